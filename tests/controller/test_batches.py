"""Steps that are made again are made of the same groups."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from controller_rig import make_tracker
from fakes import make_group, make_rollout

from millrace.config import JournalConfig, load_config
from millrace.controller.admission import Admission
from millrace.controller.batches import Batches
from millrace.controller.buffer import Buffer
from millrace.controller.orders import build_group_order
from millrace.core.microbatch import Batch
from millrace.core.records import Group, Task
from millrace.core.staleness import PolicyVersions
from millrace.journal import Journal, JournalHistory, Ledger, read_journal

REPLAY = {"share": 0.5, "max_staleness": 9}


class BatchRig:
    """A buffer, its batches, and their journal."""

    def __init__(self, folder: Path, **settings: object) -> None:
        config = load_config(
            {
                "model": "none",
                **settings,
                "trainer": {"groups_per_step": 2},
                "buffer": {"max_staleness": 9, "replay": REPLAY},
            }
        )
        self.journal = Journal(
            folder,
            history=read_journal(folder) or JournalHistory(ledger=Ledger.begin()),
            task_of=lambda number, draw: Task(prompt=str(number)),
            settings=JournalConfig(),
            commit_interval_s=0,
        )
        self.admission = Admission(
            groups_per_step=2, limit=config.buffer.limit, max_running=9, version=0
        )
        self.buffer = Buffer(
            capacity=16,
            limit=config.buffer.limit,
            order=build_group_order(config.buffer.order),
            on_drop=lambda waiting: None,
        )
        self.batches = Batches(
            config=config,
            buffer=self.buffer,
            tracker=make_tracker(
                self.admission,
                journal=self.journal,
                versions=PolicyVersions(dict.fromkeys(config.policies, 0)),
            ),
            with_batch_advantages=list,
            journal=self.journal,
        )

    async def admit(self, number: int, group: Group | None = None) -> None:
        self.journal.issue_task(number, draw=None)
        group = group or make_group(number, sampled_tokens=3 + number)
        await self.journal.admit_group(group)
        await self.buffer.admit(group)

    async def learn(self, versions: range) -> list[tuple[list[int], frozenset[int], bytes]]:
        done = []
        for version in versions:
            taken = await self.batches.next(version)
            self.batches.applied(taken, version=version + 1, was_skipped=False)
            numbers = [group.number for group in taken.groups]
            done.append((numbers, taken.replayed, bytes_of(taken.batches)))
        return done


def bytes_of(batches: tuple[Batch, ...]) -> bytes:
    microbatches = [microbatch for batch in batches for microbatch in batch.microbatches]
    names = ("tokens", "targets", "predictors", "engine_logprobs", "advantages", "versions")
    return b"".join(
        np.ascontiguousarray(getattr(m, n)).tobytes() for m in microbatches for n in names
    )


@pytest.fixture
async def learned(tmp_path) -> tuple[Path, list, list[int]]:
    """Six steps of a run that then ended, some of their groups replayed."""
    rig = BatchRig(tmp_path)
    for number in range(12):
        await rig.admit(number)
    done = await rig.learn(range(6))
    await rig.journal.close()
    assert any(replayed for _, replayed, _ in done)
    return tmp_path, done, list(rig.batches.replayable)


async def test_resumed_run_repeats_its_steps_and_continues_as_it_would_have(learned):
    folder, done, replayable = learned
    rig = BatchRig(folder)
    waiting = await rig.batches.restore(2)
    assert await rig.learn(range(2, 6)) == done[2:]
    assert rig.batches.replayable == replayable
    assert rig.admission._accepted == sum(len(replayed) for _, replayed, _ in done[2:])
    trained = [n for numbers, replayed, _ in done for n in numbers if n not in replayed]
    for group in waiting:
        await rig.buffer.admit(group)
    ((numbers, replayed, _),) = await rig.learn(range(6, 7))
    assert not set(numbers) - replayed & set(trained)
    assert not replayed & {n for _, earlier, _ in done for n in earlier}
    await rig.journal.close()


async def test_redo_gives_the_same_batches_and_changes_nothing(learned):
    folder, done, _ = learned
    rig = BatchRig(folder)
    before = rig.journal.position
    again = [(v, bytes_of(batches)) async for v, batches in rig.batches.redo(after=3, through=5)]
    assert again == [(4, done[3][2]), (5, done[4][2])]
    assert rig.journal.position == before
    assert rig.admission._accepted == 0
    await rig.journal.close()


POLICIES = {"policies": {"proposer": {}, "solver": {}}}


def two_roles(number: int, *, solver_plays: bool = True) -> Group:
    """A group in which the second episode of the solver is missing, or all of its turns."""
    group = make_group(number)
    episodes = []
    for index, episode in enumerate(group.episodes):
        (own,) = episode.rollouts
        rollouts = [replace(own, policy="proposer")]
        if solver_plays and index == 0:
            rollouts.append(replace(make_rollout(seed=900 + number), policy="solver"))
        episodes.append(replace(episode, rollouts=tuple(rollouts)))
    by_token = tuple(
        np.full(len(rollout.tokens), 10.0 * number + place, np.float32)
        for place, rollout in enumerate(r for e in episodes for r in e.rollouts)
    )
    return replace(group, episodes=tuple(episodes), token_advantages=by_token)


async def test_each_policy_gets_the_tokens_and_advantages_of_its_own_rollouts(tmp_path):
    rig = BatchRig(tmp_path, **POLICIES)
    for number in (0, 1):
        await rig.admit(number, two_roles(number))
    taken = await rig.batches.next(0)
    (proposer,), (solver,) = taken.batches, taken.others["solver"]
    assert (proposer.num_sequences, solver.num_sequences) == (4, 2)
    assert (proposer.num_groups, solver.num_groups) == (2, 2)
    found = [np.concatenate([m.advantages for m in b.microbatches]) for b in (proposer, solver)]
    assert set(found[0]) == {0.0, 2.0, 10.0, 12.0}
    assert set(found[1]) == {1.0, 11.0}
    trained = np.concatenate([m.targets for m in solver.microbatches])
    own = [make_rollout(seed=900 + number) for number in (0, 1)]
    assert sorted(trained) == sorted(np.concatenate([r.tokens[r.mask] for r in own]))
    again = [b async for _, b in rig.batches.redo(after=0, through=1, policy="solver")]
    assert [bytes_of(batches) for batches in again] == [bytes_of((solver,))]
    await rig.journal.close()


async def test_policy_without_tokens_gets_an_empty_batch(tmp_path):
    rig = BatchRig(tmp_path, **POLICIES)
    for number in (0, 1):
        await rig.admit(number, two_roles(number, solver_plays=False))
    taken = await rig.batches.next(0)
    (solver,) = taken.others["solver"]
    assert (solver.microbatches, solver.num_trained_tokens) == ((), 0)
    # The step makes no version of it.
    versions = rig.batches.tracker.versions
    assert [versions.at(1, policy=name) for name in ("proposer", "solver")] == [1, 0]
    assert taken.batches[0].num_sequences == 4
    await rig.journal.close()
