"""The policies of a run besides the first, and the broadcasts of all. Each other policy has
its own trainer, engines and checkpoints. With [lora], trainer and engines are those of the first,
and have an adapter of each.

Promise: a step makes a version of each policy that sampled some of its tokens, and each trains only
the rollouts that its own engines sampled. A checkpoint of the first policy is written after those
of the others, and theirs are removed after its own: if it has one of a step, all have.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.cluster.messages import Stepped
from millrace.controller.batches import TakenBatch
from millrace.core.errors import CheckpointError
from millrace.core.staleness import PolicyVersions
from millrace.inference.pool import EnginePool
from millrace.training.checkpoints.directory import keep_steps
from millrace.training.group import TrainerGroup
from millrace.weights.broadcaster import Subscription, VersionBroadcaster

PREFIX = "policies"  # of the metrics of each policy


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OtherPolicy:
    name: str
    policy: str  # its name in the trainer: DEFAULT_POLICY if that trains no other
    trainer: TrainerGroup
    broadcaster: VersionBroadcaster
    engines: EnginePool
    versions: Subscription  # of its engines
    checkpoints: Path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VersionBroadcasts:
    """How new versions of all policies leave their trainers, while the run lasts."""

    sources: Sequence[tuple[VersionBroadcaster, TrainerGroup]]
    engines: Mapping[str | None, Subscription]  # of the rollouts, by policy; None = the first
    notified: Subscription | None  # of external engines

    def begin(self, activities: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [
            activities.create_task(broadcaster.run(trainer))
            for broadcaster, trainer in self.sources
        ]

    async def reached(self, step: int, *, versions: PolicyVersions) -> None:
        """Wait until engines hold the versions after a step."""
        for policy, held in self.engines.items():
            await held.reached(versions.at(step, policy=policy))


async def step_all(
    first: TrainerGroup, others: Sequence[OtherPolicy], taken: TakenBatch, *, version: int
) -> Stepped:
    """Let all trainers do the step that is called `version`, each with its own batches."""
    steps = [
        other.trainer.step(*taken.others[other.name], version=version)
        for other in others
        if other.trainer is not first
    ]
    stepped, *more = await asyncio.gather(first.step(*taken.batches, version=version), *steps)
    more += stepped.others.values()
    return stepped if not others else _joined(stepped, more, names=taken.policies)


def _joined(first: Stepped, others: Sequence[Stepped], *, names: Sequence[str]) -> Stepped:
    """The reply of all: metrics without a prefix are those of the first policy."""
    replies = (first, *others)
    prefixed = {
        f"{PREFIX}/{name}/{metric}": value
        for name, stepped in zip(names, replies, strict=True)
        for metric, value in stepped.metrics.items()
    }
    return msgspec.structs.replace(
        first,
        metrics={**first.metrics, **prefixed},
        skipped=tuple(sorted({index for stepped in replies for index in stepped.skipped})),
        reported={n: own for stepped in replies for n, own in stepped.reported.items()},
    )


async def save_others(
    others: Sequence[OtherPolicy], step: str, *, run_state: Mapping[str, Any]
) -> list[str]:
    """Have their checkpoints of `step` on the disk; returns complaints. No step begins meanwhile,
    because the first policy is saved after that, so a trainer that dies is waited for."""
    saves = [
        other.trainer.save(
            other.checkpoints / step,
            run_state=dict(run_state),
            is_last=True,
            on_copied=lambda: None,
            policy=other.policy,
        )
        for other in others
    ]
    saved = await asyncio.gather(*saves)
    return [reply.complaint for reply in saved if reply.complaint is not None]


async def prune_others(others: Sequence[OtherPolicy], *, first: Path) -> list[str]:
    """Remove their checkpoints of steps of which the `first` policy has none any more; returns
    complaints."""
    complaints: list[str] = []
    for other in others:
        try:
            await asyncio.to_thread(keep_steps, other.checkpoints, like=first)
        except CheckpointError as error:
            complaints.append(str(error))
    return complaints
