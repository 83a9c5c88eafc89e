"""The audit log: what tenants do. Runs on the event loop."""

import fcntl
import json
import os
import time
from pathlib import Path

from millrace.core.errors import ConfigError
from millrace.serving.tinker.states import iso_time


class AuditLog:
    """A line of JSON for each accepted request, only ever appended to; only its owner reads it. One
    process at a time has it open."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.fdopen(os.open(path, flags, 0o600), "a", buffering=1)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"--train-dir {path.parent} belongs to another server; stop it, or choose another."
            ) from None

    def close(self) -> None:
        self._file.close()

    def write(self, tenant: str, operation: str, *, about: str, tokens: int = 0) -> None:
        """`about`: the model, path, session or sampler."""
        line = {"time": iso_time(time.time()), "tenant": tenant, "operation": operation}
        self._file.write(json.dumps({**line, "about": about, "tokens": tokens}) + "\n")
