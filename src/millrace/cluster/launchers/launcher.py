"""How worker processes are started: the base class of launchers, which the hub calls.

Promise of every launcher: a worker that ends, however it ends, is reported with its exit code or
signal where the system tells it. A worker ends with the process that started it, and no process
outlives close(). Messages to and from a worker go through the hub, not the launcher.
Everything here runs on the controller's event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one worker needs from a cluster that shares out its hosts."""

    cpus: int = 1
    gpus: int = 0
    or_cpu: bool = False  # a host without a GPU may compute on its CPU instead
    device_bytes: int = 0  # on each GPU, or on the CPU without one; checked when a host joins


NO_NEEDS = Resources()


class HostDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of one host."""

    name: str  # "cuda:0" or "cpu"
    kind: str  # such as "NVIDIA H200"
    total_bytes: int
    entry: str = ""  # of a GPU in CUDA_VISIBLE_DEVICES of its host, which need not be its number

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """A worker to start: `python -m module`."""

    name: str
    module: str  # "" if whoever starts it knows, as a host that joins with a role does
    token: str = field(repr=False)  # with which it authenticates
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # besides the inherited one
    has_secrets: bool = False  # its environment holds the user's keys, too


class JoinSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that a host which joins is to start."""

    name: str  # of the worker
    token: str  # with which that worker authenticates; its host passes it on
    num_gpus: int = 0  # that the worker uses, if its host has any

    def __repr__(self) -> str:
        return f"JoinSlot(name={self.name!r})"


class ProcessExit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the process of a worker ended."""

    reason: str  # continues the sentence "Worker 'engine-0' ..."
    log_tail: str = ""
    code: int | None = None  # negative if a signal ended it; None if unknown


class WorkerProcess:
    """The process of one worker, on any host; this class itself is one that has not started."""

    host: str | None = None  # name of its host; None on the controller's
    pid: int | None = None  # None on another host
    log: Path | None = None  # file with its output; None on another host
    devices: tuple[HostDevice, ...] = ()  # that a host which joined has chosen for it

    @property
    def is_stopped(self) -> bool:
        """True if it is known to be stopped by SIGSTOP."""
        return False

    async def exited(self) -> ProcessExit:
        """Wait for its end; the hub calls this once, as soon as it has the process."""
        raise NotImplementedError

    def terminate(self) -> None: ...

    def kill(self) -> None:
        """Kill it and the processes it started."""

    async def dump_stacks(self) -> tuple[str, str]:
        """Have it write the stacks of its threads to its log; returns the outcome, with the place
        of the log, and the end of the log. A host that joined kills the worker, too."""
        return "it had not started", ""

    def log_tail(self) -> str:
        """The end of its output, as far as it is known here."""
        return ""

    def on_message(self) -> None:
        """The hub has received a message of this worker."""


class Launcher:
    """By default a launcher reserves nothing, and its workers end by themselves."""

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """Hold resources for workers that start together, by name, until release(). Raises
        ConfigError, with what is missing, if the cluster does not have them."""

    async def release(self, name: str) -> None:
        """Give back what was reserved for a worker that is not started again."""

    async def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start the process of a worker. Raises WorkerError if it does not come up, and
        ConfigError if another attempt would fail as well."""
        raise NotImplementedError

    async def close(self) -> None:
        """End all that the launcher has started."""
