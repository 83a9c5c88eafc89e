"""The whole protocol of durability under random crashes: admit, take, step, checkpoint, resume.

Journal, buffer, batches, dispatcher and partial rollouts are the real ones, on real files of a disk
that loses what was not synced. Engines and the trainer are scripted. The trainer's weights are a
hash of everything that it learned, so that a version which is made again from other groups is
noticed. A token is a hash of the weights that sampled it, its group and its place, so that a token
which comes from anywhere else is noticed, too.
"""

import asyncio
import hashlib
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_rig import make_dispatcher, make_tracker
from crashing_disk import CrashingDisk
from fakes import FakeScorers, make_chunk, make_group
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.config import JournalConfig, load_config
from millrace.controller.admission import Admission
from millrace.controller.batches import Batches, TakenBatch
from millrace.controller.buffer import Buffer
from millrace.controller.orders import build_group_order
from millrace.core.errors import Filtered, JournalError, ScoreError
from millrace.core.records import Completion, Group, Request, Sampling, Task
from millrace.environments.rollouts.partial_rollouts import PartialRollouts, ReplayingEngine
from millrace.journal import Journal, read_journal
from millrace.run.resume import Cursor, resume_history
from millrace.tasks.streams import Curriculum

GROUPS = 2  # of a step
MAX_STALENESS = 2
REPLAY = {"share": 0.5, "max_staleness": 6}
TASKS = [Task(prompt=f"task {n}") for n in range(5)]
NUM_TOKENS = 4  # of a completion
# What a disk may lose is simulated, so that waiting for a real one proves nothing.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def token_of(weights: str, *, seed: int, index: int, place: int) -> int:
    """What these weights sample there."""
    digest = hashlib.sha256(f"{weights} {seed} {index} {place}".encode()).digest()
    return int.from_bytes(digest[:3], "little")


@dataclass(kw_only=True, eq=False)
class InEngine:
    """A request in an engine: the tokens of its completions so far."""

    request: Request
    tell: Any
    parts: list[list[tuple[int, int]]]  # token and version, by member

    def sample(self, member: int, *, version: int, weights: str) -> None:
        own, request = self.parts[member], self.request
        place, index = len(own), request.index + member
        if place < NUM_TOKENS:
            token = token_of(weights, seed=request.seed, index=index, place=place)
            own.append((token, version))
            self.tell(make_chunk(as_completion(own[place:], "interrupt"), member=member))


def as_completion(tokens: list[tuple[int, int]], finish: str) -> Completion:
    return Completion(
        tokens=np.array([token for token, _ in tokens], np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.array([version for _, version in tokens], np.int32),
        finish=finish,  # pyright: ignore
        text="",
    )


@dataclass(kw_only=True)
class Trainer:
    """Remembers all it learned; `weights` are one hash for each version."""

    weights: list[str] = field(default_factory=lambda: ["start"])
    learned: list[tuple[int, ...]] = field(default_factory=list)  # fresh numbers by step
    relearned: list[int] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.weights) - 1

    def step(self, taken: TakenBatch) -> None:
        for group in taken.groups:
            seed = int(group.scores[0].total)
            for index, rollout in enumerate(group.rollouts):
                for place, at in enumerate(np.flatnonzero(rollout.mask)):
                    weights = self.weights[rollout.versions[at]]
                    token = token_of(weights, seed=seed, index=index, place=place)
                    assert rollout.tokens[at] == token, "another one sampled it"
            assert group.task.prompt == group.episodes[0].turns[0].prompt
        digest = hashlib.sha256(self.weights[-1].encode())
        for batch in taken.batches:
            for microbatch in batch.microbatches:
                digest.update(microbatch.tokens.tobytes() + microbatch.advantages.tobytes())
        self.weights.append(digest.hexdigest()[:12])
        self.learned.append(tuple(group.number for group in taken.fresh))
        self.relearned += taken.replayed

    def copy(self) -> "Trainer":
        return replace(
            self,
            weights=list(self.weights),
            learned=list(self.learned),
            relearned=list(self.relearned),
        )


@dataclass(kw_only=True)
class Checkpoint:
    trainer: Trainer
    run_state: dict[str, Any]


class Process(FakeScorers):
    """A controller from its start to its death."""

    def __init__(
        self,
        disk: CrashingDisk,
        checkpoint: Checkpoint | None,
        *,
        replay: bool,
        sampled_at: dict[int, int],
    ) -> None:
        state = {} if checkpoint is None else checkpoint.run_state
        saved = Trainer() if checkpoint is None else checkpoint.trainer
        self.trainer = saved.copy()
        version = self.visible = self.trainer.version
        at = Cursor(
            version=version,
            next_number=state.get("next_number", 0),
            unfinished=state.get("unfinished", ()),
            journal=state.get("journal"),
        )
        history, self.warnings = resume_history(disk.folder, at)
        self.covered = (version, at.journal)
        self.tasks = Curriculum(TASKS, seed=0, target=0.5, explore_share=0.2)
        self.tasks.restore(state.get("tasks", {}))
        for number in history.ledger.open & history.ledger.draws.keys():
            self.tasks.remember(number, history.ledger.draws[number])
        self.journal = Journal(
            disk.folder,
            history=history,
            task_of=self.tasks.redrawn,
            settings=JournalConfig(),
            commit_interval_s=0,
            connect=disk.connect,
        )
        self.partials = PartialRollouts(
            self.journal, every_s=1e9
        )  # written down when the test says so
        self.playing: dict[int, asyncio.Future[str]] = {}  # what comes of each
        self.sampling: dict[int, list[InEngine]] = {}  # requests of these
        self.sampled_at = sampled_at  # version by number
        self._wire(replay=replay, version=version)

    def _wire(self, *, replay: bool, version: int) -> None:
        ledger = self.journal.ledger
        more = {"replay": REPLAY} if replay else {}
        config = load_config(
            {
                "model": "none",
                "trainer": {"groups_per_step": GROUPS},
            }
            | {"buffer": {"capacity": 3, "max_staleness": MAX_STALENESS, **more}}
        )
        taking = max(version, ledger.last_step)
        begun = ledger.redone(after=version)
        self.admission = Admission(
            groups_per_step=GROUPS,
            limit=config.buffer.limit,
            max_running=4,
            version=version,
            begun=len(begun),
        )
        self.admission.take_next(taking)
        self.tracker = make_tracker(
            self.admission,
            tasks=self.tasks,
            journal=self.journal,
            max_failure_share=1.0,
            version=taking,
            next_number=ledger.next_number,
            unfinished=sorted(ledger.running),
            begun=begun,
        )
        self.buffer = Buffer(
            capacity=config.buffer.capacity,
            limit=config.buffer.limit,
            order=build_group_order(config.buffer.order),
            on_drop=self.tracker.expired_in_buffer,
        )
        self.batches = Batches(
            config=config,
            buffer=self.buffer,
            tracker=self.tracker,
            with_batch_advantages=self.with_batch_advantages,
            journal=self.journal,
        )
        self.dispatcher = make_dispatcher(
            self.tracker,
            player=self,
            scorers=self,
            buffer=self.buffer,
            partials=self.partials,
        )

    @property
    def is_reading(self) -> bool:
        """True while a group reads the tokens that it had before a crash."""
        running = self.dispatcher._running.items()
        is_alive = not self.dispatching.done()
        opening = [n for n, one in running if one.stage == "generating" and n not in self.playing]
        return is_alive and any(number in self.journal._has_partials for number in opening)

    async def start(self) -> None:
        waiting = await self.batches.restore(self.trainer.version)
        self.dispatching = asyncio.create_task(self.dispatcher.run(waiting))

    async def die(self) -> None:
        self.dispatching.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await self.dispatching
        await self.journal.close()

    async def play_for_training(
        self, task: Task, *, attempt: Any, group_size: int, scoring: Any
    ) -> Group:
        future = self.playing[attempt.number] = asyncio.get_running_loop().create_future()
        self.sampling[attempt.number] = []
        request = Request(
            id=f"group {attempt.number}, try {attempt.tries}",
            prompt=np.zeros(3, np.int32),
            sampling=Sampling(),
            n=2,
            seed=10 * attempt.number + attempt.tries,
            expires=True,
        )
        try:
            replaying = ReplayingEngine(self, partial=attempt.partial)
            completions = await replaying.generate(request)
        finally:
            del self.playing[attempt.number], self.sampling[attempt.number]
        attempt.record(completions)
        outcome = future.result() if future.done() else "good"  # all of it was known
        self.sampled_at[attempt.number] = min(int(one.versions.min()) for one in completions)
        group = _group_of(attempt.number, completions)
        first = group.episodes[0]
        turn = replace(first.turns[0], prompt=task.prompt)
        score = replace(group.scores[0], total=float(request.seed))
        return replace(
            group,
            task=replace(task, columns={"outcome": outcome}),
            episodes=(replace(first, turns=(turn,)), *group.episodes[1:]),
            scores=(score, *group.scores[1:]),
        )

    async def generate(
        self, request: Request, on_tokens: Any = None, on_completion: Any = None
    ) -> list[Completion]:
        """As an engine."""
        number = request.seed // 10
        known = request.partial
        begun = [] if known is None else list(zip(known.tokens, known.versions, strict=True))
        one = InEngine(
            request=request,
            tell=on_tokens,
            parts=[list(begun) for _ in range(request.n)],
        )
        self.sampling[number].append(one)
        await asyncio.shield(self.playing[number])
        for member in range(request.n):
            for _ in range(NUM_TOKENS):
                weights = self.trainer.weights[self.visible]
                one.sample(member, version=self.visible, weights=weights)
        return [as_completion(own, "stop") for own in one.parts]

    async def score(self, group: Group, scoring: Any) -> Group:
        if group.task.columns["outcome"] == "failed":
            raise ScoreError("no")
        return group

    async def shape(self, group: Group) -> Group:
        if group.task.columns["outcome"] == "filtered":
            raise Filtered("dull")
        return replace(group, task=replace(group.task, columns={}))


def _group_of(number: int, completions: list[Completion]) -> Group:
    group = make_group(number, sampled_tokens=NUM_TOKENS)
    episodes = []
    for episode, completion in zip(group.episodes, completions, strict=True):
        (rollout,) = episode.rollouts
        tokens, versions = rollout.tokens.copy(), rollout.versions.copy()
        tokens[rollout.mask] = completion.tokens
        versions[rollout.mask] = completion.versions
        rollouts = (replace(rollout, tokens=tokens, versions=versions),)
        episodes.append(replace(episode, rollouts=rollouts))
    return replace(group, episodes=tuple(episodes))


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.loop = asyncio.new_event_loop()
        self.disk = CrashingDisk(self.folder / "journal")
        self.checkpoints: list[Checkpoint] = []  # the two newest
        self.sampled_at: dict[int, int] = {}
        self.made: dict[int, str] = {}  # the weights of each version that ever was

    @initialize(replay=st.booleans())
    def begin(self, replay: bool) -> None:
        self.replay = replay
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "process"):
            self._run(self.process.die())
        self.loop.close()
        shutil.rmtree(self.folder)

    @rule(choice=st.integers(0), outcome=st.sampled_from(["good"] * 4 + ["failed", "filtered"]))
    def finish_a_group(self, choice: int, outcome: str) -> None:
        playing = sorted(self.process.playing)
        if playing:
            self.process.playing[playing[choice % len(playing)]].set_result(outcome)
        self._run(self._turn())

    @rule(choice=st.integers(0), member=st.integers(0, 1))
    def sample_a_token(self, choice: int, member: int) -> None:
        process = self.process
        requests = [one for number in sorted(process.sampling) for one in process.sampling[number]]
        if requests:
            one = requests[choice % len(requests)]
            weights = process.trainer.weights[process.visible]
            one.sample(member % one.request.n, version=process.visible, weights=weights)

    @rule(then_crash=st.booleans(), seed=st.integers(0, 2**32))
    def save_partial_rollouts(self, then_crash: bool, seed: int) -> None:
        self._run(self.process.partials.save())
        if then_crash:
            self._crash_after_saving(seed)

    @rule(rounds=st.integers(1, 4), saves=st.booleans())
    def run_undisturbed(self, rounds: int, saves: bool) -> None:
        for _ in range(rounds):
            for playing in self.process.playing.values():
                playing.set_result("good")
            self._run(self._turn())
            if self._can_step():
                self._run(self._step("well"))
            self.weights_arrive()
        if saves and self.process.trainer.version > self._saved():
            self._run(self._checkpoint("well"))

    @precondition(lambda self: self._can_step())
    @rule(ends=st.sampled_from(["well"] * 3 + ["taken", "stepped"]), seed=st.integers(0, 2**32))
    def step(self, ends: str, seed: int) -> None:
        self._run(self._step(ends))
        if ends != "well":
            self._crash(seed)

    @rule()
    def weights_arrive(self) -> None:
        self.process.visible = self.process.trainer.version
        self.process.admission.advance(self.process.visible)
        self._run(self._turn())

    @precondition(lambda self: self.process.trainer.version > self._saved())
    @rule(ends=st.sampled_from(["well"] * 3 + ["unsaved", "uncovered"]), seed=st.integers(0, 2**32))
    def checkpoint(self, ends: str, seed: int) -> None:
        self._run(self._checkpoint(ends))
        if ends != "well":
            self._crash(seed)

    @rule(seed=st.integers(0, 2**32))
    def crash(self, seed: int) -> None:
        self._crash(seed)

    @rule(seed=st.integers(0, 2**32), commits=st.integers(0, 3), what=st.integers(0, 3))
    def lose_power_in_the_middle_of_something(self, seed: int, commits: int, what: int) -> None:
        self.disk.commits_left = commits
        with suppress(JournalError, ExceptionGroup):
            for number in sorted(self.process.playing)[: 1 + commits]:
                self.process.playing[number].set_result("good")
            if what == 0 and self._can_step():
                self._run(self._step("well"))
            elif what == 1 and self.process.trainer.version > self._saved():
                self._run(self._checkpoint("well"))
            else:
                self._run(self._turn())
        self._crash(seed)

    @precondition(lambda self: len(self.checkpoints) == 2)
    @rule(seed=st.integers(0, 2**32))
    def crash_and_lose_the_newest_checkpoint(self, seed: int) -> None:
        self.checkpoints.pop()
        self._crash(seed)

    @invariant()
    def nothing_is_trained_twice_or_replayed_twice(self) -> None:
        trainer = self.process.trainer
        trained = [number for step in trainer.learned for number in step]
        assert len(trained) == len(set(trained))
        assert len(trainer.relearned) == len(set(trainer.relearned))

    @invariant()
    def a_version_is_the_same_however_often_it_is_made(self) -> None:
        for version, weights in enumerate(self.process.trainer.weights):
            assert self.made.setdefault(version, weights) == weights

    @invariant()
    def the_ledger_adds_up(self) -> None:
        ledger = self.process.journal.ledger
        assert ledger.check() == []
        assert self.process.warnings == []
        trained = {n for step in self.process.trainer.learned for n in step}
        is_redone = {*ledger.redone(after=self.process.trainer.version)}
        assert ledger.totals["trained"] == len(trained | is_redone) - len(ledger.training)
        assert not trained & ledger.open
        self._run(self.process.journal.flush())
        saved = read_journal(self.disk.folder, list_closed=True)
        assert saved is not None
        assert saved.ledger == replace(ledger, totals=+ledger.totals)
        assert {*saved.closed.get("trained", ())} == (trained | is_redone) - ledger.training

    @invariant()
    def open_tasks_are_running_or_waiting(self) -> None:
        cursor = self.process.tracker.cursor()
        is_redone = self.process.journal.ledger.redone(after=self.process.trainer.version)
        assert {*cursor["unfinished"]} == self.process.journal.ledger.open | {*is_redone}

    def _saved(self) -> int:
        return self.checkpoints[-1].trainer.version if self.checkpoints else 0

    def _can_step(self) -> bool:
        process = self.process
        is_begun = process.trainer.version + 1 in process.journal.ledger.steps
        return is_begun or process.buffer.depth >= GROUPS

    async def _turn(self) -> None:
        """Run until everything waits."""
        for _ in range(5):
            for _ in range(20):
                await asyncio.sleep(0)
            while self.process.is_reading:  # noqa: ASYNC110 - in a thread, until it is done
                await asyncio.sleep(0.001)
            await self.process.journal.flush()

    async def _step(self, ends: str) -> None:
        process = self.process
        version = process.trainer.version
        taking = asyncio.create_task(process.batches.next(version))
        # If power is lost, the turn fails first, and the rule does not read the error of this task.
        taking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await self._turn()
        if version + 1 not in process.journal.ledger.steps:
            # What has become too stale is not enough for a batch.
            taking.cancel()
            return
        taken = await taking
        if ends == "taken":
            return
        process.trainer.step(taken)
        if ends == "stepped":
            return
        process.batches.applied(taken, version=version + 1, was_skipped=False)
        await process.dispatcher.expire(max(version + 1, process.journal.ledger.last_step))
        process.admission.take_next(version + 1)
        await self._turn()

    async def _checkpoint(self, ends: str) -> None:
        process = self.process
        position = process.journal.position
        cursor = process.tracker.cursor()
        state = {"journal": position, **cursor}
        kept = process.trainer.copy()
        await process.journal.flush()
        if ends == "unsaved":
            return
        self.checkpoints = [*self.checkpoints, Checkpoint(trainer=kept, run_state=state)][-2:]
        if ends == "uncovered":
            return
        (version, at), process.covered = process.covered, (kept.version, position)
        if at is not None:
            await process.journal.discard_covered(
                version, position=at, keep=process.batches.replayable
            )

    def _start(self) -> None:
        newest = self.checkpoints[-1] if self.checkpoints else None
        self.process = self._run(self._make(newest))
        self._run(self._turn())

    async def _make(self, checkpoint: Checkpoint | None) -> Process:
        process = Process(self.disk, checkpoint, replay=self.replay, sampled_at=self.sampled_at)
        await process.start()
        return process

    def _crash(self, seed: int) -> None:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:  # a commit that failed may be lost
            self.disk.copy_acknowledged(Path(folder))
            saved = read_journal(Path(folder))
        assert saved is not None
        admitted = saved.ledger.retained & self.process.journal.ledger.retained
        sampled_at = dict(self.sampled_at)  # of what is there before it is played again
        self.disk.commits_left = 0
        self._run(self.process.die())
        self.disk.crash(seed)
        self._start()
        ledger = self.process.journal.ledger
        trained = {n for step in self.process.trainer.learned for n in step}
        for number in admitted - ledger.retained - trained:
            # Too stale for the next take, so that it is played again.
            assert ledger.last_step - sampled_at[number] > MAX_STALENESS, "it is lost"
            if number not in ledger.open:  # for the last time
                assert ledger.totals["dropped: stale"] > 0

    def _crash_after_saving(self, seed: int) -> None:
        """Running groups resume from their tokens, unless these are too stale."""
        before = _sampled(self.process)
        self._crash(seed)
        oldest = self.process.journal.ledger.last_step - MAX_STALENESS
        after = _sampled(self.process)
        for (number, seed, index), tokens in before.items():
            if number in self.process.sampling and min(v for _, v in tokens) >= oldest:
                assert after.get((number, seed, index)) == tokens

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


def _sampled(process: Process) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """Tokens and versions of completions in flight, by number, seed and index."""
    return {
        (number, one.request.seed, one.request.index + member): list(tokens)
        for number, requests in process.sampling.items()
        for one in requests
        for member, tokens in enumerate(one.parts)
        if tokens
    }


class TestProtocol(Protocol.TestCase):
    """Always the same crashes; see below for others."""

    settings = settings(max_examples=8, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestProtocolAtLength(Protocol.TestCase):
    settings = settings(max_examples=80, stateful_step_count=60, derandomize=False)
