"""What each step trains on: groups from the buffer and the replay buffer, packed.

Promise: a batch is `groups_per_step` groups, each within its staleness limit at the version it is
taken for. The journal holds the choice before the batch is used, so a repeated step gets the same
groups in the same order. Of several policies, each trains the rollouts that it sampled. Runs on the
controller's event loop; packing runs in a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.config import RunConfig
from millrace.controller.buffer import Buffer, ReplayBuffer, interleave
from millrace.controller.group_tracker import GroupTracker
from millrace.core.microbatch import Batch
from millrace.core.records import Group, Rollout
from millrace.journal import Journal, NoJournal
from millrace.journal.ledger import LedgerStep
from millrace.monitoring.files.samples import reported_rollouts
from millrace.scoring.advantages import PAIRS
from millrace.training.packing.packer import minibatches_of, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenBatch:
    groups: list[Group]
    replayed: frozenset[int]  # numbers of the groups that were trained before
    batches: tuple[Batch, ...]  # of the first policy, and of all that share its trainer
    others: Mapping[str, tuple[Batch, ...]]  # of policies with trainers of their own, by name
    policies: tuple[str, ...] = ()  # names of all of them, if there are several
    trained: tuple[str, ...] = ()  # those that have tokens in it

    @property
    def fresh(self) -> list[Group]:
        return [group for group in self.groups if group.number not in self.replayed]


@dataclass(kw_only=True, eq=False)
class Batches:
    config: RunConfig
    buffer: Buffer
    tracker: GroupTracker
    # Gives the groups of one step their advantages relative to each other.
    with_batch_advantages: Callable[[Sequence[Group]], list[Group]]
    journal: Journal | NoJournal

    def __post_init__(self) -> None:
        replay, limit = self.config.buffer.replay, self.config.buffer.limit
        groups_per_step = self.config.trainer.groups_per_step
        self._replay = ReplayBuffer(
            per_batch=replay.groups_of(groups_per_step) if replay else 0,
            # As many as are trained until the first of them is too stale.
            capacity=groups_per_step * replay.max_staleness if replay else 0,
            limit=replace(limit, max_staleness=replay.max_staleness) if replay else limit,
            seed=self.config.seed,
            versions=self.tracker.versions,
        )

    async def next(self, version: int) -> TakenBatch:
        """The batch for the step after `version`, once there are enough groups."""
        taken = await self._next(version)
        self.tracker.versions.record(version + 1, trained=taken.trained)
        return taken

    async def _next(self, version: int) -> TakenBatch:
        step = self.journal.ledger.steps.get(version + 1)
        if step is not None:  # the batch was taken before a crash
            self._replay.forget(step.replayed)
            self.tracker.admission.replay(len(step.replayed))
            return await self._read(step)
        replayed = self._replay.draw(version)
        self.tracker.admission.replay(len(replayed))
        num_fresh = self.config.trainer.groups_per_step - len(replayed)
        fresh = await self.buffer.take(num_fresh, version=version)
        if self.config.weights.interrupt == "barrier":
            # The order must not depend on how fast groups were generated.
            fresh.sort(key=lambda group: group.number)
        await self.journal.begin_step(
            version + 1, fresh=_numbers(fresh), replayed=_numbers(replayed)
        )
        return await asyncio.to_thread(self._pack, fresh, replayed)

    async def redo(
        self, *, after: int, through: int, policy: str | None = None
    ) -> AsyncIterator[tuple[int, tuple[Batch, ...]]]:
        """The versions after `after` and the batches that made them, for a restarted trainer.
        `policy`: which trainer's; None = the first."""
        for version in range(after + 1, through + 1):
            taken = await self._read(self.journal.ledger.steps[version])
            yield version, taken.batches if policy is None else taken.others[policy]

    def applied(self, taken: TakenBatch, *, version: int, was_skipped: bool) -> None:
        """The trainer has reached `version`. Unless it was skipped, its groups may be replayed."""
        self.tracker.trained(_numbers(taken.fresh))
        self.journal.finish_step(version, was_skipped=was_skipped)
        if not was_skipped:
            self._replay.keep(taken.fresh)

    @property
    def replayable(self) -> Collection[int]:
        return self._replay.numbers

    async def restore(self, version: int) -> list[Group]:
        """Fill the replay buffer as it was after the step that made `version`, from the journal.
        Returns the groups that waited in the buffer."""
        if self.config.buffer.replay is not None:
            steps = [step for v, step in self.journal.ledger.steps.items() if v <= version]
            gone = {number for step in steps for number in step.replayed}
            for step in steps:
                if step.status != "skipped":
                    left = [number for number in step.fresh if number not in gone]
                    self._replay.keep(await self.journal.read_groups(left))
        return await self.journal.read_groups(list(self.journal.ledger.waiting))

    async def _read(self, step: LedgerStep) -> TakenBatch:
        fresh = await self.journal.read_groups(step.fresh)
        replayed = await self.journal.read_groups(step.replayed)
        return await asyncio.to_thread(self._pack, fresh, replayed)

    def _pack(self, fresh: list[Group], replayed: list[Group]) -> TakenBatch:
        groups = self.with_batch_advantages(interleave(fresh, replayed))
        trainer = self.config.trainer
        numbers = frozenset(group.number for group in replayed)
        reported = reported_rollouts(
            [group for group in groups if group.number not in numbers],
            self.config.monitoring.samples_per_step,
        )
        minibatches = minibatches_of(groups, num_minibatches=trainer.minibatches)
        if not self.config.policies:
            batches = tuple(self._packed(minibatch, reported) for minibatch in minibatches)
            return TakenBatch(groups=groups, replayed=numbers, batches=batches, others={})
        of_policies = {
            name: tuple(
                self._packed(own, reported)
                for minibatch in minibatches
                if (own := rollouts_of(minibatch, policy=name))
            )
            or (Batch(microbatches=(), num_sequences=0, num_trained_tokens=0),)
            for name in self.config.policies
        }
        batches, *others = of_policies.values()
        for policy, own in zip(self.config.adapter_policies, others, strict=False):
            batches += tuple(replace(batch, policy=policy) for batch in own)
        first, *names = of_policies
        is_shared = bool(self.config.adapter_policies)
        return TakenBatch(
            groups=groups,
            replayed=numbers,
            batches=batches,
            others={} if is_shared else {name: of_policies[name] for name in names},
            policies=(first, *names),
            trained=tuple(name for name, own in of_policies.items() if own[0].microbatches),
        )

    def _packed(self, minibatch: Sequence[Group], reported: Mapping[Rollout, int]) -> Batch:
        sizes = self.config.trainer.mesh_sizes
        return pack(
            minibatch,
            microbatch_tokens=self.config.trainer.microbatch_tokens * sizes.cp,
            pairs=self.config.scoring.advantages.get("type") == PAIRS,
            whole_groups=bool(self.config.loss.get("minimum_variance_baseline")),
            critic=self.config.critic is not None,
            scores=self.config.loss.get("good_by") == "score",
            num_ranks=sizes.num_data_ranks,
            reported=reported,
        )


def rollouts_of(groups: Iterable[Group], *, policy: str) -> list[Group]:
    """The groups with the rollouts of one policy alone, without groups and episodes in which it has
    no trained token."""
    found: list[Group] = []
    for group in groups:
        assert group.advantages is not None, "a group is scored before it is packed"
        own = [
            tuple(r for r in episode.rollouts if r.policy == policy and r.num_sampled)
            for episode in group.episodes
        ]
        kept = [index for index, rollouts in enumerate(own) if rollouts]
        by_token = group.token_advantages
        if by_token is not None:
            pairs = zip(group.rollouts, by_token, strict=True)
            by_token = tuple(a for r, a in pairs if r.policy == policy and r.num_sampled)
        if kept:
            found.append(
                replace(
                    group,
                    episodes=tuple(replace(group.episodes[i], rollouts=own[i]) for i in kept),
                    scores=tuple(group.scores[i] for i in kept),
                    advantages=group.advantages[kept],
                    token_advantages=by_token,
                )
            )
    return found


def _numbers(groups: Sequence[Group]) -> list[int]:
    return [group.number for group in groups]
