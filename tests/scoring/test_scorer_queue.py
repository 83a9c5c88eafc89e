"""How one scorer is called: places, batches, retries, the breaker, withdrawal."""

import asyncio
from time import monotonic

import pytest
from scripted_scorer import ScriptedScorer, episode, settle

from millrace.core.errors import RunFailed, ScoreError, TransientScoreError
from millrace.core.records import Task
from millrace.scoring.scheduling.scorer_queue import GroupRef, ScorerQueue
from millrace.scoring.scorer_type import CallSettings


class Bench:
    """A queue whose backoff pauses end at once."""

    def __init__(self, *, now=None, **calls):
        self.scorer = ScriptedScorer()
        self.warnings, self.pauses = [], []
        self.now_s = 0.0
        self.queue = ScorerQueue(
            self.scorer,
            calls=CallSettings(**calls),
            warn=self.warnings.append,
            now=now or (lambda: self.now_s),
            sleep=self._sleep,
            draw=lambda: 1.0,
        )
        self._groups = {}

    async def _sleep(self, pause_s):
        self.pauses.append(pause_s)
        await asyncio.sleep(0)

    def submit(self, *texts, group=0):
        ref = GroupRef(order=group, number=group, task=Task(prompt="p"))
        ref = self._groups.setdefault(group, ref)
        return asyncio.create_task(self.queue.score([episode(t) for t in texts], group=ref))

    async def scores(self, *texts, group=0):
        return [result.score for result in await self.submit(*texts, group=group)]


def down(message="down", **about):
    return TransientScoreError(message, is_down=True, **about)


async def test_no_more_calls_are_in_flight_than_allowed_and_older_groups_go_first():
    bench = Bench(concurrency=2)
    bench.scorer.let.clear()
    asks = [bench.submit(f"g{n}", group=n) for n in (5, 6)]
    await settle()
    asks += [bench.submit(f"g{n}", group=n) for n in (9, 1)]
    await settle()
    assert bench.scorer.calls == [["g5"], ["g6"]]
    load = bench.queue.load()
    assert (load.in_flight, load.concurrency, load.waiting) == (2, 2, 2)
    bench.scorer.let.set()
    await asyncio.gather(*asks)
    assert bench.scorer.calls[2:] == [["g1"], ["g9"]]


async def test_episodes_of_a_group_that_wait_share_a_call_up_to_the_batch_and_no_others_do():
    bench = Bench(concurrency=1, batch=3)
    bench.scorer.let.clear()
    asks = [bench.submit("first")]
    await settle()
    asks += [bench.submit(text) for text in "abcd"]
    asks += [bench.submit("x", group=1)]
    await settle()
    bench.scorer.let.set()
    await asyncio.gather(*asks)
    assert bench.scorer.calls == [["first"], ["a", "b", "c"], ["d"], ["x"]]
    assert [task.result()[0].score for task in asks] == [5.0, 1.0, 1.0, 1.0, 1.0, 1.0]


async def test_with_a_batch_of_0_what_is_asked_together_stays_together():
    bench = Bench(batch=0)
    assert bench.queue.takes_groups
    assert await bench.scores("a", "bb", "ccc") == [1.0, 2.0, 3.0]
    assert bench.scorer.calls == [["a", "bb", "ccc"]]


async def test_busy_and_waiting_time_add_up():
    bench = Bench(concurrency=1)
    bench.scorer.let.clear()
    asks = [bench.submit("a"), bench.submit("b", group=1), bench.submit("c", group=2)]
    await settle()
    bench.now_s += 2.0
    load = bench.queue.load()
    assert (load.busy_s, load.waiting_s) == (2.0, 4.0)
    bench.scorer.let.set()
    await asyncio.gather(*asks)
    bench.now_s += 5.0
    load = bench.queue.load()
    assert (load.busy_s, load.waiting_s, load.episodes) == (2.0, 4.0, 3)


async def test_what_fails_for_the_moment_is_tried_again_after_pauses_that_double():
    bench = Bench(retries=3, backoff_s=0.5, breaker_failures=0)
    errors = [TransientScoreError("a"), down(), TransientScoreError("c"), None]
    bench.scorer.fails = lambda group: errors.pop(0)
    assert await bench.scores("a") == [1.0]
    assert bench.pauses == [0.5, 1.0, 2.0]
    load = bench.queue.load()
    assert (load.calls, load.retries, load.failures, load.waiting) == (4, 3, 0, 0)


async def test_a_pause_is_as_long_as_the_other_side_asks_for():
    bench = Bench(retries=1)
    errors = [down(retry_after_s=7.0), None]
    bench.scorer.fails = lambda group: errors.pop(0)
    await bench.scores("a")
    assert bench.pauses == [7.0]


async def test_when_the_retries_are_used_up_the_group_fails_with_the_last_reason():
    bench = Bench(retries=2)
    bench.scorer.fails = lambda group: TransientScoreError("Judge says nothing.")
    with pytest.raises(ScoreError, match=r"^Judge says nothing \(tried 3 times\)\.$"):
        await bench.scores("a")
    load = bench.queue.load()
    assert (load.calls, load.retries, load.failures) == (3, 2, 1)


async def test_what_is_wrong_for_good_is_not_tried_again():
    bench = Bench(retries=5)
    bench.scorer.fails = lambda group: ScoreError("no such model")
    with pytest.raises(ScoreError, match="no such model"):
        await bench.scores("a")
    assert len(bench.scorer.calls) == 1
    assert bench.queue.load().failures == 1


async def test_while_nobody_can_be_asked_calls_wait_and_none_is_lost():
    bench = Bench(now=monotonic, concurrency=4, retries=1, breaker_failures=3, breaker_s=1e-3)
    probes = 0

    def fails(group):
        nonlocal probes
        probes += 1
        return down("connection refused") if probes < 30 else None

    bench.scorer.fails = fails
    asks = [bench.submit(f"g{n}", group=n) for n in range(9)]
    results = await asyncio.wait_for(asyncio.gather(*asks), 20)
    assert [result.score for (result,) in results] == [2.0] * 9
    load = bench.queue.load()
    assert (load.episodes, load.failures, load.breaker_opened) == (9, 0, 1)
    assert not load.is_held
    (warning,) = bench.warnings
    assert "'scripted' is unreachable" in warning
    assert "connection refused" in warning


async def test_while_the_breaker_is_open_one_call_goes_first():
    bench = Bench(concurrency=8, breaker_failures=1, breaker_s=1e-3)
    bench.scorer.fails = lambda group: down()
    asks = [bench.submit("g0")]
    await settle()
    assert bench.queue.load().is_held
    bench.scorer.let.clear()
    bench.now_s += 1.0
    asks += [bench.submit(f"g{n}", group=n) for n in range(1, 5)]
    await settle()
    assert (bench.queue.load().in_flight, bench.queue.load().waiting) == (1, 4)
    bench.scorer.fails = lambda group: None
    bench.scorer.let.set()
    await asyncio.gather(*asks)


async def test_a_call_that_brings_the_scorer_down_each_time_gives_way_to_others_and_fails_at_last():
    bench = Bench(now=monotonic, concurrency=1, retries=2, breaker_failures=2, breaker_s=1e-3)
    bench.scorer.fails = lambda group: down("500") if group.number == 0 else None
    poison = bench.submit("x")
    await settle()
    good = [bench.submit("a", group=n) for n in range(1, 20)]
    await asyncio.wait_for(asyncio.gather(*good), 20)
    for number in range(20, 40):
        await asyncio.wait_for(bench.scores("a", group=number), 20)
    with pytest.raises(ScoreError, match="500"):
        await asyncio.wait_for(poison, 20)


async def test_withdrawn_episodes_leave_the_line_and_their_call_is_cancelled():
    bench = Bench(concurrency=1, batch=2)
    bench.scorer.let.clear()
    running, waiting, kept = (
        bench.submit("a"),
        bench.submit("b", group=1),
        bench.submit("c", group=1),
    )
    await settle()
    running.cancel()
    waiting.cancel()
    await settle()
    assert bench.scorer.num_cancelled == 1
    bench.scorer.let.set()
    assert [result.score for result in await kept] == [1.0]
    assert bench.scorer.calls == [["a"], ["c"]]
    load = bench.queue.load()
    assert (load.in_flight, load.waiting) == (0, 0)


async def test_a_call_that_is_withdrawn_in_the_moment_it_begins_leaves_its_place_to_others():
    bench = Bench(concurrency=1)
    bench.scorer.let.clear()
    first, second = bench.submit("a"), bench.submit("b", group=1)
    await settle()
    bench.scorer.let.set()  # the first call ends, so the second begins,
    second.cancel()  # while nobody wants it any more
    await asyncio.gather(first, second, return_exceptions=True)
    assert bench.queue.load().in_flight == 0
    assert await bench.scores("c", group=2) == [1.0]
    assert bench.scorer.calls == [["a"], ["c"]]


async def test_one_that_is_withdrawn_before_its_next_try_is_not_tried_again():
    bench = Bench(retries=5)
    pausing = asyncio.Event()

    async def sleep(pause_s):
        pausing.set()
        await asyncio.Event().wait()

    bench.queue._sleep = sleep
    bench.scorer.fails = lambda group: TransientScoreError("later")
    ask = bench.submit("a")
    await pausing.wait()
    assert bench.queue.load().waiting == 1
    ask.cancel()
    await settle()
    assert len(bench.scorer.calls) == 1
    assert bench.queue.load().waiting == 0


@pytest.mark.parametrize("turns", range(6))
async def test_whenever_a_call_is_withdrawn_the_next_one_has_its_place(turns):
    bench = Bench(concurrency=1, breaker_failures=1, breaker_s=1.0)
    bench.scorer.fails = lambda group: down() if group.number == 0 else None
    failing = bench.submit("x")
    await settle()
    assert bench.queue.load().is_held
    failing.cancel()
    bench.now_s += 1.0  # whoever comes now goes first
    bench.scorer.let.clear()
    withdrawn = bench.submit("a", group=1)
    for _ in range(turns):
        await asyncio.sleep(0)
    withdrawn.cancel()
    await settle()
    bench.scorer.let.set()
    await settle()
    assert await asyncio.wait_for(bench.scores("b", group=2), 5) == [1.0]
    assert bench.queue.load().in_flight == 0


async def test_a_fault_of_ours_is_raised_as_it_is():
    bench = Bench()
    bench.scorer.fails = lambda group: KeyError("bug")
    with pytest.raises(KeyError):
        await bench.scores("a")


async def test_closing_tells_all_that_wait():
    bench = Bench(concurrency=1)
    bench.scorer.let.clear()
    asks = [bench.submit("a"), bench.submit("b", group=1)]
    await settle()
    await bench.queue.close()
    for outcome in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(outcome, RunFailed)
    with pytest.raises(RunFailed, match="closed"):
        await bench.scores("c")


async def test_a_scorer_that_does_not_judge_each_episode_costs_the_group():
    bench = Bench(batch=0)
    judge = bench.scorer.score

    async def judge_one(group):
        return (await judge(group))[:1]

    bench.scorer.score = judge_one
    with pytest.raises(ScoreError, match="'scripted' returned 1 results for 2 episodes of group 0"):
        await bench.scores("a", "b")
