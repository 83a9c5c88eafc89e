"""How worker processes come to be: the Launcher protocol, which the hub calls.

Promise of every launcher: a worker that ends, however it ends, is reported with its exit code or
signal where the system tells it. A worker ends with the process that started it, and no process
outlives close(). What a worker is told and what it answers goes through the hub, not the launcher.

Everything here runs on the controller's event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from millrace.cluster.messages import ProcessExit


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one worker needs from a cluster that shares out its hosts."""

    cpus: int = 1
    gpus: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """A worker to start: `python -m module`."""

    name: str
    module: str  # "" if whoever starts it knows, as a host that joins with a role does
    token: str = field(repr=False)  # with which it authenticates
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # besides the inherited one
    has_secrets: bool = False  # its environment holds the user's keys, too


class WorkerProcess(Protocol):
    """The process of one worker, on any host."""

    @property
    def host(self) -> str | None:
        """Name of its host; None on the controller's."""
        ...

    @property
    def pid(self) -> int | None:
        """None on another host."""
        ...

    @property
    def log(self) -> Path | None:
        """File with its output; None on another host."""
        ...

    @property
    def is_stopped(self) -> bool:
        """True if it is known to be stopped by SIGSTOP."""
        ...

    async def exited(self) -> ProcessExit:
        """Wait for its end; the hub calls this once, as soon as it has the process."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        """Kill it and the processes it started."""

    async def dump_stacks(self) -> tuple[str, str]:
        """Have it write the stacks of its threads to its log; returns the outcome, with the place
        of the log, and the end of the log."""
        ...

    def log_tail(self) -> str:
        """The end of its output, as far as it is known here."""
        ...

    def on_message(self) -> None:
        """The hub has received a message of this worker."""


class Launcher(Protocol):
    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """Hold resources for workers that start together, by name, until release(). Raises
        ConfigError, with what is missing, if the cluster does not have them."""

    async def release(self, name: str) -> None:
        """Give back what was reserved for a worker that is not started again."""

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start the process of a worker. Raises WorkerError if it does not come up, and
        ConfigError if another attempt would fail as well."""
        ...

    async def close(self) -> None:
        """End all that the launcher has started."""
