"""Starts groups as admission allows, and takes each from its task to the buffer.

Promise: a failing task or scorer costs its own group only. A group that can no longer be trained
within the staleness limit is cancelled at once. The journal holds a group before the buffer does.
Runs on the controller's event loop, one asyncio task per running group; admission bounds their
number.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from millrace.controller.admission import Admission, SyncBarrier
from millrace.controller.buffer import Buffer, RunningGroup
from millrace.controller.group_tracker import REDUNDANT, GroupTracker
from millrace.core.errors import Filtered, ScoreError, TaskError
from millrace.core.records import Group
from millrace.core.staleness import TokenVersions
from millrace.environments.rollouts.partial_rollouts import Attempt, Expired, PartialRollouts
from millrace.environments.rollouts.player import Player
from millrace.inference.pool import EnginePool
from millrace.scoring.pool import ScorerPool


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    attempt: Attempt
    task: asyncio.Task[None]
    version: int  # of the engines when it started
    stage: Literal["generating", "scoring", "waiting"] = "generating"
    token_versions: TokenVersions | None = None  # of its trained tokens, once all are sampled
    is_expired: bool = False  # cancelled for its staleness, not because the run ends


@dataclass(kw_only=True, slots=True, eq=False)
class Dispatcher:
    """The parts that a group passes through."""

    player: Player
    scorers: ScorerPool
    buffer: Buffer
    admission: Admission
    tracker: GroupTracker
    partials: PartialRollouts
    engines: EnginePool
    # Of the policies besides the first, by name; those that are adapters are in `engines`.
    others: Mapping[str, EnginePool] = field(default_factory=dict[str, EnginePool])
    group_size: int  # episodes started for each group
    barrier: SyncBarrier | None = None
    _running: dict[int, _Running] = field(default_factory=dict[int, _Running])  # by number

    def is_awaited(self, number: int) -> bool:
        """True if a group with a lower number has not reached the buffer yet."""
        return any(running < number for running in self._running)

    @property
    def generating(self) -> int:
        return sum(running.stage == "generating" for running in self._running.values())

    @property
    def scoring(self) -> int:
        return sum(running.stage == "scoring" for running in self._running.values())

    def running(self) -> Iterator[RunningGroup]:
        """The groups that have not reached the buffer yet."""
        for number, running in self._running.items():
            attempt = running.attempt
            oldest = self._token_versions(running).oldest
            oldest = running.version if oldest is None else min(oldest, running.version)
            yield RunningGroup(number, oldest, age_s=attempt.now() - attempt.life.started_s)

    async def run(self, waiting: Iterable[Group] = ()) -> None:
        """Start groups until cancelled; raises RunFailed after too many failures. `waiting`: groups
        that were complete before a crash and return to the buffer."""
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self.partials.run())
            if self.barrier is not None:
                groups.create_task(self.barrier.run())
            for group in waiting:
                self._start(self.tracker.readmit(group.number), groups, admitted=group)
            while True:
                await self.admission.enter()
                self._start(self.tracker.issue(), groups)

    async def expire(self, version: int) -> None:
        """Cancel groups that cannot be trained at `version`, which is the next take's, or later."""
        self.admission.take_next(version)
        self.tracker.version = version
        for running in self._running.values():
            if self._is_ruled_out(running) and not running.is_expired:
                running.is_expired = running.task.cancel()
        limit, at = self.admission.limit, self.tracker.versions.at
        if not limit.one_token_decides:
            return
        oldest = {name: limit.oldest_at(at(version, policy=name)) for name in self.others}
        shared = {name: n for name, n in oldest.items() if self.others[name] is self.engines}
        await self.engines.expire(limit.oldest_at(at(version)), shared)
        for name, engines in self.others.items():
            if engines is not self.engines:
                await engines.expire(oldest[name])

    def _start(
        self, attempt: Attempt, groups: asyncio.TaskGroup, *, admitted: Group | None = None
    ) -> None:
        task = groups.create_task(self._run_group(attempt, admitted))
        self._running[attempt.number] = _Running(
            attempt=attempt, task=task, version=self.admission.version
        )

    async def _run_group(self, attempt: Attempt, admitted: Group | None) -> None:
        """Take one group to the buffer. `admitted`: the complete group, restored after a crash."""
        running = self._running[attempt.number]
        try:
            if admitted is None:
                group = await self._generate_and_score(running)
                running.stage = "waiting"
                group = replace(group, life=attempt.ended("buffered"))
                await self.tracker.admitted(group)
            else:
                group = admitted
                running.stage = "waiting"
                self._check_staleness(group, running)
            await self.buffer.admit(group)
        except (TaskError, ScoreError) as error:
            self.tracker.failed(attempt, error)
        except Filtered as filtered:
            self.tracker.filtered(attempt, reason=filtered.reason)
        except Expired:
            self.tracker.expired(attempt, stage=running.stage)
        except asyncio.CancelledError:
            if not running.is_expired:
                raise
            self.tracker.expired(attempt, stage=running.stage)
        finally:
            self.tracker.count_unused(attempt)
            del self._running[attempt.number]
            self.admission.leave()
        await self.buffer.recheck()  # a batch in order may have waited for this group

    async def _generate_and_score(self, running: _Running) -> Group:
        attempt = running.attempt
        task = self.tracker.tasks.task(attempt.number)
        async with self.partials.open(attempt, is_trainable=self._may_be_trained):
            with self.scorers.open(number=attempt.number, task=task) as scoring:
                if self.barrier is not None:
                    await self.barrier.wait()
                group = await self.player.play_for_training(
                    task, attempt=attempt, group_size=self.group_size, scoring=scoring
                )
                attempt.life.generated_s = attempt.now()
                self.tracker.waste.add(REDUNDANT, attempt.given_up, version=self.tracker.version)
                self._check_staleness(group, running)
                self.tracker.cancellations.learn(attempt.finished)
                running.stage = "scoring"
                group = await self.scorers.score(group, scoring)
                attempt.life.scored_s = attempt.now()
                attempt.life.scores = [score.total for score in group.scores]
                self.tracker.observe(group)
                group = await self.scorers.shape(group)
        # Again, because shaping may have masked some tokens.
        running.token_versions = TokenVersions.of_group(group)
        return group

    def _check_staleness(self, group: Group, running: _Running) -> None:
        """Raises Expired if a complete group is too stale."""
        running.token_versions = TokenVersions.of_group(group)
        if self._is_ruled_out(running):
            raise Expired(f"group {group.number}")

    def _is_ruled_out(self, running: _Running) -> bool:
        """True if the limit will certainly not allow it any more."""
        limit = self.admission.limit
        if limit.only_at_take:
            return False
        if running.token_versions is None and not limit.one_token_decides:
            return False  # tokens to come may lower its mean or its share of stale tokens
        return not limit.allows(self._token_versions(running), version=self.tracker.version)

    def _token_versions(self, running: _Running) -> TokenVersions:
        """The versions of its tokens so far, aligned with the next take."""
        tokens = running.token_versions
        tokens = running.attempt.known if tokens is None else tokens
        return self.tracker.versions.aligned(tokens, self.tracker.version)

    def _may_be_trained(self, tokens: TokenVersions) -> bool:
        """False if these tokens certainly rule their group out."""
        limit, version = self.admission.limit, self.tracker.version
        tokens = self.tracker.versions.aligned(tokens, version)
        return not limit.one_token_decides or limit.allows(tokens, version=version)
