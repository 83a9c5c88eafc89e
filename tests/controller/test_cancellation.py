"""Groups that become too stale: cancelled at once, tried again, counted."""

import asyncio
from contextlib import suppress

import pytest
from controller_rig import make_dispatcher, make_tracker
from fakes import FakeScorers, FakeTasks, make_completion, make_group

from millrace.controller.admission import Admission
from millrace.controller.group_tracker import MAX_TRIES
from millrace.core.staleness import BufferedGroup, StalenessLimit, TokenVersions
from millrace.environments.rollouts.partial_rollouts import WINDOW, Attempt, Cancellations, Expired

EXACT = StalenessLimit(max_staleness=0)


def waiting(group):
    return BufferedGroup(group=group, token_versions=TokenVersions.of_group(group))


class Bench(FakeScorers):
    """A dispatcher whose groups stop at each stage until the test lets them continue."""

    def __init__(self, *, groups=2, limit=EXACT):
        self.attempts = []
        self.stage = {stage: asyncio.Event() for stage in ("generating", "scoring", "waiting")}
        self.admitted = []
        self.expire_in_engine = set()
        self.tasks = FakeTasks()
        self.admission = Admission(groups_per_step=groups, limit=limit, max_running=9, version=0)
        self.tracker = make_tracker(self.admission, tasks=self.tasks, warn=pytest.fail)
        self.dispatcher = make_dispatcher(self.tracker, player=self, scorers=self, buffer=self)
        self.running = asyncio.create_task(self.dispatcher.run())

    async def play_for_training(self, task, *, attempt, group_size, scoring):
        self.attempts.append((attempt.number, attempt.tries))
        await self.stage["generating"].wait()
        attempt.record([make_completion("abcd", version=attempt.tries)])
        if attempt.number in self.expire_in_engine:
            attempt.cut.append(2)
            raise Expired
        return make_group(attempt.number, versions=attempt.tries)

    async def score(self, group, scoring):
        await self.stage["scoring"].wait()
        return group

    async def admit(self, group):
        await self.stage["waiting"].wait()
        self.admitted.append(group)

    async def recheck(self):
        pass

    async def expire(self, version, adapters=None):
        await self.dispatcher.expire(version)
        self.admission.take_next(0)  # as if the engines held that version already

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self):
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running


@pytest.fixture
async def bench():
    bench = Bench()
    await bench.settle()
    yield bench
    await bench.close()


@pytest.mark.parametrize("stage", ["scoring", "waiting"])
async def test_group_that_becomes_too_stale_is_cancelled_and_issued_again_at_once(bench, stage):
    bench.stage["generating"].set()
    if stage == "waiting":
        bench.stage["scoring"].set()
    await bench.settle()
    assert bench.attempts == [(0, 0), (1, 0)]
    await bench.expire(version=1)
    await bench.settle()
    assert sorted(bench.attempts[2:]) == [(0, 1), (1, 1)]
    assert bench.tracker.cancellations.by_reason == {stage: 2}
    assert bench.tracker.waste.tokens == {"cancelled": 2 * 4}
    assert bench.tracker.waste.staleness_means == {"cancelled": 1.0}
    assert bench.admission.running == 2
    for event in bench.stage.values():
        event.set()
    await bench.settle()
    assert sorted(group.number for group in bench.admitted) == [0, 1]
    assert all(TokenVersions.of_group(group).oldest == 1 for group in bench.admitted)


async def test_group_within_the_limit_continues(bench):
    bench.stage["generating"].set()
    await bench.settle()
    await bench.expire(version=0)
    await bench.settle()
    assert bench.attempts == [(0, 0), (1, 0)]
    assert not bench.tracker.cancellations.by_reason


MEAN = StalenessLimit(max_staleness=1, measure="mean")
SHARE = StalenessLimit(max_staleness=1, measure="share", max_stale_share=0.5)


@pytest.mark.parametrize("limit", [MEAN, SHARE])
async def test_group_that_fresh_tokens_may_still_save_continues(limit):
    bench = Bench(limit=limit)
    await bench.settle()
    running = next(iter(bench.dispatcher._running.values()))
    running.attempt.record([make_completion("abcd", version=0)])
    await bench.expire(version=2)
    await bench.settle()
    assert not bench.tracker.cancellations.by_reason
    bench.stage["generating"].set()  # all groups are complete now, and all of version 0
    await bench.settle()
    assert bench.tracker.cancellations.by_reason == {"generating": 4}
    assert bench.dispatcher.scoring == 4  # their second tries, of version 1
    await bench.close()


@pytest.mark.parametrize("limit", [MEAN, SHARE])
async def test_complete_group_is_cancelled_exactly_when_its_measure_rules_it_out(limit):
    bench = Bench(limit=limit)
    bench.stage["generating"].set()
    await bench.settle()
    running = bench.dispatcher._running
    running[0].token_versions = TokenVersions(
        counts={0: 5, 2: 4}
    )  # at version 2: mean 10 / 9, share 5 / 9
    running[1].token_versions = TokenVersions(counts={0: 4, 2: 4})  # 1 and 1 / 2
    await bench.expire(version=2)
    await bench.settle()
    assert (0, 1) in bench.attempts
    assert (1, 1) not in bench.attempts
    await bench.close()


async def test_wasted_tokens_are_counted_by_reason(bench):
    for event in bench.stage.values():
        event.set()
    await bench.settle()
    await bench.expire(version=3)
    bench.tracker.expired_in_buffer(waiting(make_group(0, versions=[0, 0, 1, 1], size=1)))
    assert bench.tracker.waste.tokens["dropped"] == 4
    assert bench.tracker.waste.staleness_means["dropped"] == 2.5


async def test_group_that_an_engine_expired_is_issued_again(bench):
    bench.expire_in_engine = {1}
    bench.stage["generating"].set()
    await bench.settle()
    assert bench.attempts == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert bench.tracker.cancellations.by_reason == {"generating": MAX_TRIES}


async def test_group_that_is_too_stale_after_generation_is_not_scored(bench):
    await bench.expire(version=1)
    bench.stage["generating"].set()
    await bench.settle()
    assert bench.tracker.cancellations.by_reason == {"generating": 2}
    assert bench.dispatcher.scoring == 2  # their second tries


async def test_group_counts_as_dropped_after_its_last_try(bench):
    for event in bench.stage.values():
        event.set()
    await bench.settle()
    for tries in range(1, MAX_TRIES + 1):
        assert bench.tracker.dropped == {}
        bench.tracker.expired_in_buffer(waiting(make_group(0)))
        await bench.settle()
        assert (0, tries) in bench.attempts or tries == MAX_TRIES
    assert bench.tracker.dropped == {"stale": 1}
    assert bench.tracker.cancellations.by_reason == {"waiting": MAX_TRIES}
    assert 0 not in bench.tracker.cursor()["unfinished"]
    assert bench.tasks.finished == [0]  # once, after the last try
    assert (2, 0) in bench.attempts  # its place went to a new group


async def test_cursor_names_cancelled_groups_as_unfinished(bench):
    bench.stage["generating"].set()
    await bench.settle()
    await bench.expire(version=1)
    assert bench.tracker.cursor() == {"next_number": 2, "unfinished": [0, 1], "tasks": {}}
    await bench.settle()
    assert bench.tracker.cursor() == {"next_number": 2, "unfinished": [0, 1], "tasks": {}}


async def test_end_of_the_run_counts_nothing_as_cancelled(bench):
    bench.stage["generating"].set()
    await bench.settle()
    await bench.close()
    assert not bench.tracker.cancellations.by_reason
    assert bench.tracker.cursor()["unfinished"] == [0, 1]


def test_saving_estimate_is_the_mean_rest_of_longer_recent_completions():
    cancellations = Cancellations()
    cancellations.learn([2, 10, 20, 30])
    cancellations.count("generating", cut=[10, 5])
    # After 10 tokens: 10 or 20 more. After 5: 5, 15 or 25 more.
    assert cancellations.tokens_saved == 15 + 15
    cancellations.count("generating", cut=[40])
    assert cancellations.tokens_saved == 30  # none was longer


def test_only_recent_lengths_count():
    cancellations = Cancellations()
    cancellations.learn([1000] * 10 + [8] * WINDOW)
    cancellations.count("generating", cut=[5])
    assert cancellations.tokens_saved == 3


def test_attempt_knows_the_versions_of_its_finished_completions():
    attempt = Attempt(0)
    assert attempt.token_versions.counts == {}
    attempt.record([make_completion("ab", version=6)])
    attempt.record([make_completion("c", version=4), make_completion("d", version=6)])
    assert attempt.token_versions.counts == {4: 1, 6: 3}
