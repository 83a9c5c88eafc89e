"""Workers as child processes of the controller, forked from the fork server where it can run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.address import ClientKeys, Credentials
from millrace.cluster.fork_server import ForkServer
from millrace.cluster.launchers.launcher import Resources, WorkerSpec
from millrace.cluster.process import Process, start_worker


@dataclass(kw_only=True, eq=False)
class LocalLauncher:
    """The launcher of a hub for its own host, which is not shared out: reserve() has no limit."""

    address: str  # of the hub
    keys: ClientKeys | None
    log_dir: Path
    fork_server: ForkServer | None

    async def reserve(self, workers: Mapping[str, Resources]) -> None: ...

    async def release(self, name: str) -> None: ...

    async def start(self, spec: WorkerSpec) -> Process:
        return await start_worker(
            spec.name,
            spec.module,
            address=self.address,
            credentials=Credentials(token=spec.token, keys=self.keys),
            log=self.log_dir / f"{spec.name}.log",
            env=spec.env,
            has_secrets=spec.has_secrets,
            fork_server=self.fork_server,
        )

    async def close(self) -> None:
        """The hub ends each worker itself."""
