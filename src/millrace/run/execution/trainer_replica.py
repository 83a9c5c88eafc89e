"""The trainer of a policy as a supervised group of rank processes.

Promise: a trainer of which a rank dies is restarted from the policy's newest checkpoint. It repeats
the steps since then with the same batches; calls to it wait meanwhile. Runs on the controller's
event loop.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.cluster import address as addresses
from millrace.cluster.messages import StartTrainer
from millrace.cluster.mps import below_normal
from millrace.cluster.supervision.replica import GroupReplica
from millrace.cluster.worker import Worker
from millrace.config import RunConfig
from millrace.run.cluster import absolute, portable
from millrace.run.policies import further_policies
from millrace.training.checkpoints.directory import newest_checkpoint, read_run_state
from millrace.training.group import StepsInMemory, TrainerGroup

if TYPE_CHECKING:
    from millrace.run.workers import RunWorkers

MIN_STEP_TIMEOUT_S = 3600.0  # a trainer that hangs is found earlier, by supervision.hang_timeout_s
SAVE_TIMEOUT_S = 1800.0  # until a checkpoint is on the disk, which may be a slow network disk


class TrainerReplica(GroupReplica):
    """The ranks of the trainer, restarted together from the newest checkpoint."""

    def __init__(self, workers: "RunWorkers", *, policy: str | None = None) -> None:
        """`policy`: the one that it trains; None = the first."""
        own = workers.prepared if policy is None else workers.prepared.policies[policy]
        config, ranks = own.config, own.config.trainer.num_ranks
        name = "trainer" if policy is None else f"trainer-{policy}"
        members = [name] if ranks == 1 else [f"trainer-{rank}" for rank in range(ranks)]
        self.members_here = members[: ranks - config.trainer.remote]  # the others join
        super().__init__(
            name,
            members=members,
            hang_timeout_s=config.supervision.hang_timeout_s,
            first_hang_timeout_s=config.cluster.start_timeout_s,
        )
        self._config = config
        self._run_dir = Path(config.run_dir)
        # A run that may go without a step for longer has steps that take longer.
        self._step_timeout_s = max(MIN_STEP_TIMEOUT_S, config.supervision.stall_timeout_s)
        self._run_workers = workers
        self._checkpoint = own.checkpoint
        self._policy = policy
        self._version = workers.prepared.cursor.version  # of the weights that the ranks have loaded
        self._trainer: TrainerGroup | None = None

    @property
    def trainer(self) -> TrainerGroup:
        assert self._trainer is not None, "the trainer is started first"
        return self._trainer

    async def launch(self, name: str) -> Worker:
        workers = self._run_workers
        if name in self.members_here:
            env = below_normal(workers.gpu_env)
            return await workers.launch(name, "millrace.training.worker", env=env)
        timeout_s = None if self._trainer is not None else self._config.cluster.join_timeout_s
        needs = workers.resources(self._config.placement.rank(0))
        return await workers.join(name, role="trainer", timeout_s=timeout_s, needs=needs)

    async def attach(self, workers: Sequence[Worker], *, is_restart: bool) -> None:
        checkpoint = self._checkpoint
        if is_restart:
            found = await asyncio.to_thread(newest_checkpoint, self._run_dir)
            checkpoint = found.directory or self._checkpoint
            self._version = 0 if checkpoint is None else read_run_state(checkpoint)["step"]
        await self._load(workers, checkpoint)
        if is_restart:
            policies = self._config.further_adapters if self._policy is None else ()
            updates = await self.trainer.replace(workers, version=self._version, policies=policies)
            for name, update in zip((self._policy, *policies), updates, strict=True):
                self._run_workers.broadcasters[name].publish(update)
            return
        self._trainer = TrainerGroup(
            workers,
            sizes=self._config.trainer.mesh_sizes,
            past=StepsInMemory(version=self._version),
            step_timeout_s=self._step_timeout_s,
            save_timeout_s=SAVE_TIMEOUT_S,
        )

    @property
    def _adapters(self) -> tuple[str, ...]:
        """Further policies that it trains."""
        return self._config.adapter_policies if self._policy is None else ()

    def detach(self) -> None:
        self.trainer.lose()

    async def _load(self, workers: Sequence[Worker], checkpoint: Path | None) -> None:
        """Let all ranks load at once; they find each other at a port of rank 0's host."""
        host, port = self._address(workers[0]), workers[0].free_address[1]
        config = self._config
        if config.trainer.remote:
            config = portable(config).updated(run_dir=str(self._run_dir.absolute()))
        num_sharing = count_sharing(config, workers)
        start = StartTrainer(
            config=config.model_dump(mode="json"),
            checkpoint=None if checkpoint is None else absolute(str(checkpoint)),
            rendezvous=f"tcp://{host}:{port}" if config.trainer.is_sharded else "",
            shares_device=max(num_sharing) > 1,
            policies=await asyncio.to_thread(self._further, checkpoint),
        )

        async def load(rank: int, worker: Worker) -> None:
            self._run_workers.loading(worker)
            own = config
            if worker.devices:  # its host shows it no other GPU
                own = config.trained_on(worker.devices[0].name.partition(":")[0])
            others = [other for other in workers if other.host != worker.host]
            message = msgspec.structs.replace(
                start,
                config=own.model_dump(mode="json"),
                rank=rank,
                num_sharing=num_sharing[rank],
                own_address="" if worker.host is None else worker.free_address[0],
                peer_address=self._address(others[0]) if others else "",
            )
            await worker.call(message, timeout_s=self._config.cluster.start_timeout_s)
            self._run_workers.on_phase(worker.name, None)

        await asyncio.gather(*(load(rank, worker) for rank, worker in enumerate(workers)))

    def _further(self, checkpoint: Path | None) -> dict[str, tuple[dict[str, Any], str | None]]:
        """Each at the step of the first policy's checkpoint."""
        if not self._adapters:
            return {}
        found = further_policies(self._config, checkpoint=checkpoint)
        return {
            name: (
                own.config.model_dump(mode="json"),
                None if own.checkpoint is None else absolute(str(own.checkpoint)),
            )
            for name, own in found.items()
        }

    def _address(self, rank: Worker) -> str:
        """The address of its host that other ranks can reach."""
        if rank.host is None and self._config.trainer.remote:
            return addresses.split(self._run_workers.hub.ticket().address)[0]
        address = rank.free_address[0]
        return f"[{address}]" if ":" in address else address


def count_sharing(config: RunConfig, ranks: Sequence[Worker]) -> list[int]:
    """The number of ranks on the device of each. Another launcher gives each rank its own."""
    if not config.cluster.is_local:
        return [1] * len(ranks)
    places = [(r.host, r.devices or config.placement.rank(i)) for i, r in enumerate(ranks)]
    return [places.count(place) for place in places]
