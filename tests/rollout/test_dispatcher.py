import asyncio
from contextlib import suppress

import pytest
from fakes import make_completion, make_group

from millrace.core.errors import RunFailed, ScoreError, TaskError
from millrace.core.records import Task
from millrace.core.staleness import StalenessLimit
from millrace.rollout.admission import Admission
from millrace.rollout.dispatcher import Dispatcher, Failures


class Bench:
    """A dispatcher between a scripted player and a list."""

    def __init__(self, *, bad=lambda number: None, max_running=4, **dispatcher):
        self.admitted = []
        limit = StalenessLimit(max_staleness=1000)
        self.admission = Admission(
            groups_per_step=10, limit=limit, max_running=max_running, version=0
        )
        self.failures = Failures(max_share=0.5)
        self.most_running = 0
        self._bad = bad
        self.dispatcher = Dispatcher(
            task_of=lambda number: Task(prompt=str(number)),
            play=self._play,
            score=self._score,
            admit=self._admit,
            admission=self.admission,
            failures=self.failures,
            limit=limit,
            **dispatcher,
        )

    async def _play(self, task, attempt):
        number = attempt.number
        self.most_running = max(self.most_running, self.admission.running)
        await asyncio.sleep(0)
        attempt.record([make_completion("abc")])
        if isinstance(error := self._bad(number), TaskError):
            raise error
        return make_group(number)

    async def _score(self, group):
        if isinstance(error := self._bad(group.number), ScoreError):
            raise error
        return group

    async def _admit(self, group):
        self.admitted.append(group.number)

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


async def test_a_failing_group_costs_only_itself_and_is_counted_by_reason():
    errors = {3: TaskError("too long"), 5: ScoreError("raised")}
    bench = Bench(bad=errors.get)
    await bench.run_until(lambda: len(bench.admitted) >= 30)
    assert 3 not in bench.admitted
    assert 5 not in bench.admitted
    assert bench.failures.by_reason == {"task": 1, "score": 1}
    assert bench.dispatcher.waste.tokens == {"failed": 2 * 3}


async def test_too_many_failures_end_the_run_with_the_last_reason():
    bench = Bench(bad=lambda number: ScoreError("reward 'f' raised") if number % 3 else None)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(bench.dispatcher.run(), 5)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, RunFailed)
    assert "reward 'f' raised" in str(failure)
    assert "max_failure_share" in str(failure)


async def test_the_cursor_names_what_was_issued_and_not_finished():
    bench = Bench()
    await bench.run_until(lambda: len(bench.admitted) >= 5)
    bench.dispatcher.finish([0, 2])
    cursor = bench.dispatcher.cursor()
    assert cursor["next_number"] >= 5
    assert set(cursor["unfinished"]) == set(range(cursor["next_number"])) - {0, 2}


async def test_resuming_issues_the_unfinished_again_before_anything_new():
    bench = Bench(next_number=10, unfinished=[8, 4])
    await bench.run_until(lambda: len(bench.admitted) >= 4)
    assert bench.admitted[:4] == [4, 8, 10, 11]
