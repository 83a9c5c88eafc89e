import asyncio
from contextlib import suppress

import pytest
from controller_rig import make_dispatcher, make_tracker
from fakes import FakeScoring, FakeTasks, make_completion, make_group

from millrace.controller.admission import Admission
from millrace.controller.group_tracker import WINDOW, Filtering
from millrace.core.errors import Filtered, RunFailed, ScoreError, TaskError
from millrace.core.staleness import StalenessLimit


class Bench:
    """A dispatcher between a scripted player and a list."""

    def __init__(self, *, bad=lambda number: None, max_running=4, max_staleness=1000, **cursor):
        self.admitted, self.warnings = [], []
        limit = StalenessLimit(max_staleness=max_staleness)
        self.admission = Admission(
            groups_per_step=10, limit=limit, max_running=max_running, version=0
        )
        self.most_running = 0
        self.scorings = {}
        self.tasks = FakeTasks()
        self._bad = bad
        self.tracker = make_tracker(
            self.admission,
            tasks=self.tasks,
            max_filtered_share=0.6,
            warn=self.warnings.append,
            **cursor,
        )
        self.dispatcher = make_dispatcher(self.tracker, player=self, scorers=self, buffer=self)

    def open(self, *, number, task):
        return self.scorings.setdefault(number, FakeScoring())

    async def play_for_training(self, task, *, attempt, group_size, scoring):
        assert scoring is self.scorings[attempt.number]
        number = attempt.number
        self.most_running = max(self.most_running, self.admission.running)
        await asyncio.sleep(0)
        attempt.record([make_completion("abc")])
        if isinstance(error := self._bad(number), TaskError):
            raise error
        return make_group(number)

    async def score(self, group, scoring):
        assert scoring is self.scorings[group.number]
        assert not scoring.is_closed
        if isinstance(error := self._bad(group.number), ScoreError):
            raise error
        return group

    async def shape(self, group):
        if isinstance(error := self._bad(group.number), Filtered):
            raise error
        return group

    async def admit(self, group):
        self.admitted.append(group.number)

    async def recheck(self):
        pass

    async def run_until(self, done):
        running = asyncio.create_task(self.dispatcher.run())
        while not done() and not running.done():  # noqa: ASYNC110 - turns of the loop, not a poll
            await asyncio.sleep(0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_groups_flow_from_task_to_buffer_in_order_and_bounded():
    bench = Bench(max_running=4)
    await bench.run_until(lambda: len(bench.admitted) >= 50)
    assert bench.admitted[:50] == list(range(50))
    assert bench.most_running <= 4


async def test_failing_group_costs_only_itself_and_is_counted_by_reason():
    errors = {3: TaskError("too long"), 5: ScoreError("raised")}
    bench = Bench(bad=errors.get)
    await bench.run_until(lambda: len(bench.admitted) >= 30)
    assert 3 not in bench.admitted
    assert 5 not in bench.admitted
    assert bench.tracker.failures.by_reason == {"task": 1, "score": 1}
    assert all(bench.scorings[number].is_closed for number in range(10))
    assert bench.tracker.waste.tokens == {"failed": 2 * 3}


async def test_every_attempt_that_ends_without_a_group_leaves_its_times_and_its_reason():
    errors = {1: TaskError("x"), 2: ScoreError("x"), 3: Filtered("dull")}
    bench = Bench(bad=errors.get)
    await bench.run_until(lambda: len(bench.admitted) >= 4)
    lost = {life.number: life for life in bench.tracker.lost}
    assert {n: (life.outcome, life.reason) for n, life in lost.items()} == {
        1: ("failed", "task"),
        2: ("failed", "score"),
        3: ("dropped", "dull"),
    }
    assert lost[1].generated_s is None
    assert lost[2].generated_s is not None
    assert lost[2].scored_s is None
    for life in lost.values():
        times = (life.started_s, life.generated_s, life.scored_s, life.ended_s)
        known = [time for time in times if time is not None]
        assert known == sorted(known)


async def test_too_many_failures_end_the_run_with_the_last_reason():
    bench = Bench(bad=lambda number: ScoreError("reward 'f' raised") if number % 3 else None)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(bench.dispatcher.run(), 5)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, RunFailed)
    assert "reward 'f' raised" in str(failure)
    assert "groups failed, and a run stops above 50%" in str(failure)


async def test_cursor_names_groups_that_were_issued_and_not_finished():
    bench = Bench()
    await bench.run_until(lambda: len(bench.admitted) >= 5)
    bench.tracker.trained([0, 2])
    cursor = bench.tracker.cursor()
    assert cursor["next_number"] >= 5
    assert set(cursor["unfinished"]) == set(range(cursor["next_number"])) - {0, 2}


async def test_resumed_run_issues_unfinished_groups_before_new_ones():
    bench = Bench(next_number=10, unfinished=[8, 4])
    await bench.run_until(lambda: len(bench.admitted) >= 4)
    assert bench.admitted[:4] == [4, 8, 10, 11]


async def test_groups_admitted_before_a_crash_return_to_the_buffer_unless_they_are_too_stale():
    bench = Bench(next_number=3, unfinished=[2], begun=[9], version=5, max_staleness=2)
    fit, old = make_group(0, versions=4), make_group(1, versions=1)
    running = asyncio.create_task(bench.dispatcher.run([fit, old]))
    while 1 not in bench.scorings:  # noqa: ASYNC110 - turns of the loop, not a poll
        await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert bench.admitted[0] == 0
    assert 0 not in bench.scorings
    assert bench.tracker.cancellations.by_reason["waiting"] == 1
    assert {0, 1, 2, 9} <= set(bench.tracker.cursor()["unfinished"])


async def test_filtered_group_is_replaced_by_a_new_one_and_not_issued_again():
    bench = Bench(bad=lambda number: Filtered("zero_variance") if number % 2 else None)
    await bench.run_until(lambda: len(bench.admitted) >= 30)
    assert bench.admitted[:30] == list(range(0, 60, 2))
    assert bench.tracker.dropped["zero_variance"] >= 29
    assert bench.tracker.failures.by_reason == {}
    cursor = bench.tracker.cursor()
    assert not any(number % 2 for number in cursor["unfinished"] if number < 58)
    assert bench.tasks.finished[:5] == [1, 3, 5, 7, 9]


async def test_batch_fills_with_unfiltered_groups_at_staleness_zero():
    """Admission allows ten groups; three of four are filtered, and still ten arrive."""
    bench = Bench(
        bad=lambda number: Filtered("zero_variance") if number % 4 else None, max_staleness=0
    )
    await bench.run_until(lambda: len(bench.admitted) >= 10)
    assert len(bench.admitted) == 10


async def test_run_that_filters_nearly_everything_continues_and_warns_once():
    bench = Bench(bad=lambda number: Filtered("zero_variance") if number % 4 else None)
    await bench.run_until(lambda: len(bench.admitted) >= 60)
    (sentence,) = bench.warnings
    assert "75% of the last 100 groups were filtered, most of them by 'zero_variance'" in sentence
    assert "tasks.order" in sentence


def test_filter_warning_repeats_only_after_the_share_has_dropped():
    said = []
    filtering = Filtering(max_share=0.5, warn=said.append)
    for _ in range(2 * WINDOW):
        filtering.dropped("overlong")
    assert len(said) == 1
    for _ in range(WINDOW):
        filtering.passed()
    for _ in range(WINDOW):
        filtering.dropped("overlong")
    assert len(said) == 2
    assert "sampling.max_new_tokens" in said[0]
    assert filtering.by_reason == {"overlong": 3 * WINDOW}
