"""Workers on other hosts, each started by a host program that has joined: `millrace join`.

JoinLauncher waits for people, or a scheduler, to start `millrace join`. HostLauncher starts a host
program for each worker, wherever the cluster has room; Ray's launcher is one, and so is a class of
the user's own. Either way the host program starts the worker as its child, reports how it ended and
ends it on demand, by messages of the hub.
"""

import asyncio
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

from millrace.cluster.join.registry import JoinedProcess, JoinRegistry
from millrace.cluster.join.ticket import JoinTicket
from millrace.cluster.launchers.launcher import (
    NO_NEEDS,
    Launcher,
    ProcessExit,
    Resources,
    WorkerSpec,
)
from millrace.core.errors import ConfigError, WorkerError, cancel_all

REPORT_S = 1.0  # for the report of a host program that has ended, about its worker


@dataclass(eq=False)
class JoinLauncher(Launcher):
    """Waits for a host that joins with the role; one per role. Host programs end with their
    workers."""

    registry: JoinRegistry
    _: KW_ONLY
    role: str
    timeout_s: float | None
    needs: Resources = NO_NEEDS  # of each worker; its host chooses the devices

    async def start(self, spec: WorkerSpec) -> JoinedProcess:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.registry.wait_for_host(
                    spec.name, spec.token, role=self.role, needs=self.needs
                )
        except TimeoutError:
            raise WorkerError(
                f"No host joined with {spec.name!r} within {self.timeout_s} s; run `millrace join`"
                " there sooner, or raise cluster.start_timeout_s.",
                worker=spec.name,
            ) from None


class HostProgram(Protocol):
    """A running host program: whatever the cluster calls a process."""

    async def ended(self) -> Exception | str:
        """Wait for its end; returns the reason. A ConfigError is for the user: another attempt
        would fail as well."""
        ...

    def kill(self) -> None:
        """End it at once, and the worker with it; does nothing if it has ended."""


class HostLauncher(Launcher):
    """Subclasses start host programs, which close() ends. The run calls connect() before its hub
    exists, then attach()."""

    registry: JoinRegistry
    ticket: JoinTicket
    timeout_s: float  # for a host program to join
    log_dir: Path  # of the run; a worker may write its log to another folder

    async def connect(self) -> str:
        """Reach the cluster; returns the address of this host that its hosts can reach. Raises
        ConfigError if that cannot work."""
        raise NotImplementedError

    def attach(
        self, registry: JoinRegistry, *, ticket: JoinTicket, timeout_s: float, log_dir: Path
    ) -> None:
        self.registry, self.ticket, self.timeout_s = registry, ticket, timeout_s
        self.log_dir = log_dir

    async def start_host(self, spec: WorkerSpec) -> HostProgram:
        """Start a program that calls join() with the ticket, the role spec.name, and the module,
        env and has_secrets of the spec, where resources are reserved for this worker."""
        raise NotImplementedError

    async def start(self, spec: WorkerSpec) -> JoinedProcess:
        joining = asyncio.create_task(
            self.registry.wait_for_host(spec.name, spec.token, role=spec.name)
        )
        try:
            program = await self.start_host(spec)
        except BaseException:
            joining.cancel()
            raise
        ending = asyncio.create_task(program.ended(), name=f"host-of-{spec.name}")
        try:
            await asyncio.wait(
                {joining, ending}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not joining.done():
                raise self._not_joined(spec.name, ending)
        except BaseException:
            joining.cancel()
            ending.cancel()
            program.kill()
            raise
        process = joining.result()
        process.on_end(program.kill)
        watching = asyncio.create_task(_report_end(process, ending))
        process.on_end(watching.cancel)
        return process

    def _not_joined(self, name: str, ending: asyncio.Task[Exception | str]) -> Exception:
        if not ending.done():
            return WorkerError(
                f"No host joined with {name!r} within {self.timeout_s:g} s (cluster.start_timeout_s"
                f"): it did not start, or it cannot reach the controller at {self.ticket.address}.",
                worker=name,
            )
        reason = ending.result()
        if isinstance(reason, ConfigError):
            return ConfigError(f"For {name}: {reason}")
        sentence = str(reason).rstrip(".")
        return WorkerError(f"The host of {name!r} ended before it joined: {sentence}.", worker=name)


async def _report_end(process: JoinedProcess, ending: asyncio.Task[Exception | str]) -> None:
    """The death of a host program is known sooner to its cluster than to the hub."""
    try:
        reason = str(await ending).rstrip(".")
        await asyncio.sleep(REPORT_S)
        process.on_exit(ProcessExit(reason=f"lost its host program on {process.host}: {reason}"))
    except asyncio.CancelledError:
        await cancel_all([ending])
