"""The launchers that pass the contract, by name, each with a hub.

Run as a program, `launchers.py KIND FOLDER`: a controller with one deaf worker, which prints the
worker's pid and waits to be killed.
"""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import msgspec
from echo_worker import ask
from hosts import Host

from millrace.cluster.hub import Hub
from millrace.cluster.join.registry import JoinedProcess
from millrace.cluster.launchers.hosts import HostLauncher, JoinLauncher
from millrace.cluster.launchers.launcher import Launcher, Resources, WorkerSpec
from millrace.cluster.launchers.ray_cluster import RayLauncher
from millrace.cluster.messages import GenerateDone
from millrace.core.errors import ConfigError

HEARTBEAT_S = 2.0


class SmallCluster(HostLauncher):
    """A cluster of this machine with two CPUs; a host program is a process of its own."""

    role = ""  # of all host programs; otherwise that of each is the name of its worker

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, Resources] = {}
        self._programs: list[Program] = []

    async def connect(self) -> str:
        return "127.0.0.1"

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        needed, taken = (
            sum(place.cpus for place in places.values()) for places in (workers, self._places)
        )
        if needed + taken > 2:
            raise ConfigError(f"The cluster has {2 - taken} of 2 CPUs free, not {needed} CPUs.")
        self._places.update(workers)

    async def release(self, name: str) -> None:
        del self._places[name]

    async def start_host(self, spec: WorkerSpec) -> "Program":
        assert spec.name in self._places
        ticket = self._folder / f"{spec.name}.json"
        ticket.touch(mode=0o600)
        ticket.write_bytes(msgspec.json.encode(self.ticket))
        folder = self._folder / f"{spec.name}-{len(self._programs)}"
        variables = [f"{name}={value}" for name, value in spec.env.items()]
        arguments = (ticket, "1", spec.module, self.role or spec.name, *variables)
        program = Program(await Host.start(*arguments, folder=folder))
        self._programs.append(program)
        return program

    async def close(self) -> None:
        for program in self._programs:
            program.kill()
            await program.host.process.wait()


class JoiningHosts(SmallCluster):
    """`millrace join` with a role, as people or a scheduler start it when the run waits for it."""

    role = "echo"

    async def start(self, spec: WorkerSpec) -> JoinedProcess:
        await self.start_host(spec)
        waiting = JoinLauncher(self.registry, role=self.role, timeout_s=self.timeout_s)
        return await waiting.start(spec)


@dataclasses.dataclass(eq=False)
class Program:
    host: Host

    async def ended(self) -> Exception | str:
        code, _, errors = await self.host.finish(timeout_s=60)
        return ConfigError(errors) if code == 2 else f"code {code}, {errors.strip()}"

    def kill(self) -> None:
        if self.host.process.returncode is None:
            self.host.process.kill()


@contextlib.asynccontextmanager
async def open_launcher(
    kind: str, folder: Path, **settings: float
) -> AsyncIterator[tuple[Hub, Launcher]]:
    launchers = {
        "cluster": lambda: SmallCluster(folder),
        "join": lambda: JoiningHosts(folder),
        "ray": RayLauncher,
    }
    launcher = launchers.get(kind, lambda: None)()
    async with contextlib.AsyncExitStack() as stack:
        address = "auto"
        if launcher is not None:
            stack.push_async_callback(launcher.close)
            address = f"tcp://{await launcher.connect()}:0"
        times = {"stop_timeout_s": 4.0, "start_timeout_s": 60.0, "heartbeat_timeout_s": HEARTBEAT_S}
        hub = await stack.enter_async_context(
            Hub(
                log_dir=folder / "logs",
                on_event=lambda *_: None,
                address=address,
                **{**times, **settings},
            )
        )
        if launcher is not None:
            launcher.attach(
                hub.registry, ticket=hub.ticket(), timeout_s=60.0, log_dir=folder / "logs"
            )
        yield hub, launcher or hub.local


async def main(kind: str, folder: Path) -> None:
    async with open_launcher(kind, folder) as (hub, launcher):
        await launcher.reserve({"echo-0": Resources()})
        worker = await hub.launch("echo-0", "echo_worker", launcher=launcher)
        reply = await worker.call(ask("pid"))
        assert isinstance(reply, GenerateDone)
        await worker.call(ask("go deaf"))
        print(int(reply.completions[0].tokens[0]), flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
