"""What tenants use: the quota of tokens per minute, and the audit log. Runs on the event loop."""

import fcntl
import json
import math
import os
import time
from pathlib import Path

from millrace.core.errors import ConfigError
from millrace.serving.api.errors import ApiError
from millrace.serving.tinker.states import iso_time


class TokenQuota:
    """The tokens that a tenant may train on and sample per minute.

    A request passes while any are left, whatever its size; the next one waits for what it took.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute  # None = no quota
        self._left, self._since_s = float(per_minute or 0), time.monotonic()

    def take(self, num_tokens: int, *, is_checked: bool = True) -> None:
        """Raise ApiError if none are left; with is_checked = False, only count the tokens."""
        if self._per_minute is None:
            return
        per_s, now_s = self._per_minute / 60, time.monotonic()
        self._left = min(self._per_minute, self._left + (now_s - self._since_s) * per_s)
        self._since_s = now_s
        if is_checked and self._left <= 0:
            message = f"You have used the quota of {self._per_minute} tokens per minute; wait."
            wait_s = math.ceil(-self._left / per_s) + 1
            raise ApiError(message, status=429, code="quota_exceeded", retry_after_s=wait_s)
        self._left -= num_tokens


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
