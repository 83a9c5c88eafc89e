"""`millrace serve` as a process of its own."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from forked_command import start_command

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_ENGINE = "millrace.inference.worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    url: str
    process: psutil.Process

    def engine(self, name: str) -> psutil.Process:
        """The process that has this name now."""
        (found,) = [
            child
            for child in self.process.children(recursive=True)
            if {_ENGINE, name} <= set(child.cmdline())
        ]
        return found


@contextmanager
def server_process(model: Path, *options: str, logs: Path) -> Iterator[ServerProcess]:
    """A server named "tiny" that ends cleanly with all its processes."""
    general = ["--port", "0", "--name", "tiny", "--log-dir", str(logs)]
    engine = ["--placement.engines", "cpu", "--cluster.threads=1"]
    env = {**os.environ, "MILLRACE_API_KEY": KEY}
    process = start_command("serve", str(model), *general, *engine, *options, env=env)
    with process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"Serving tiny at (http://127\.0\.0\.1:\d+)/v1\n", said)
            assert found, said or process.communicate()
            server = ServerProcess(url=found[1], process=psutil.Process(process.pid))
            yield server
            children = server.process.children(recursive=True)
            assert children
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0  # as services end
    assert not [child for child in children if child.is_running()]
