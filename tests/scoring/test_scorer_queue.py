"""The queue of one scorer: concurrency, batches, retries, the breaker, withdrawal."""

import asyncio
from time import monotonic

import pytest
from scripted_scorer import ScriptedScorer, episode, settle

from millrace.core.errors import RunFailed, ScoreError, TransientScoreError
from millrace.core.records import ScorerResult, Task, TokenScores
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


async def test_concurrency_is_bounded_and_older_groups_go_first():
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


async def test_scorer_that_raises_cancelled_error_fails_its_call():
    bench = Bench(concurrency=1)
    bench.scorer.fails = lambda group: asyncio.CancelledError() if group.number == 0 else None
    ask = bench.submit("a")
    await settle()
    assert ask.done()
    with pytest.raises(ScoreError, match=r"Scorer 'scripted' raised CancelledError\(\); fix it"):
        await ask
    assert await bench.scores("bc", group=1) == [2.0]
    assert bench.queue.load().failures == 1


async def test_waiting_episodes_of_a_group_share_calls_up_to_the_batch_size():
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


async def test_batch_of_0_scores_a_group_in_one_call():
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


async def test_transient_failures_are_retried_with_doubling_pauses():
    bench = Bench(retries=3, backoff_s=0.5, breaker_failures=0)
    errors = [TransientScoreError("a"), down(), TransientScoreError("c"), None]
    bench.scorer.fails = lambda group: errors.pop(0)
    assert await bench.scores("a") == [1.0]
    assert bench.pauses == [0.5, 1.0, 2.0]
    load = bench.queue.load()
    assert (load.calls, load.retries, load.failures, load.waiting) == (4, 3, 0, 0)


async def test_pause_is_at_least_retry_after():
    bench = Bench(retries=1)
    errors = [down(retry_after_s=7.0), None]
    bench.scorer.fails = lambda group: errors.pop(0)
    await bench.scores("a")
    assert bench.pauses == [7.0]


async def test_group_fails_with_the_last_error_after_all_retries():
    bench = Bench(retries=2)
    bench.scorer.fails = lambda group: TransientScoreError("Judge says nothing.")
    with pytest.raises(ScoreError, match=r"^Judge says nothing \(tried 3 times\)\.$"):
        await bench.scores("a")
    load = bench.queue.load()
    assert (load.calls, load.retries, load.failures) == (3, 2, 1)


async def test_permanent_failures_are_not_retried():
    bench = Bench(retries=5)
    bench.scorer.fails = lambda group: ScoreError("no such model")
    with pytest.raises(ScoreError, match="no such model"):
        await bench.scores("a")
    assert len(bench.scorer.calls) == 1
    assert bench.queue.load().failures == 1


async def test_calls_wait_without_loss_while_the_scorer_is_unreachable():
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


async def test_open_breaker_lets_one_probe_through():
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


async def test_call_that_always_crashes_the_scorer_lets_others_pass_and_finally_fails():
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


async def test_withdrawn_episodes_leave_the_queue_and_their_call_is_cancelled():
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


async def test_call_withdrawn_as_it_starts_frees_its_slot():
    bench = Bench(concurrency=1)
    bench.scorer.let.clear()
    first, second = bench.submit("a"), bench.submit("b", group=1)
    await settle()
    bench.scorer.let.set()  # the first call ends, so the second starts
    second.cancel()  # and is cancelled at once
    await asyncio.gather(first, second, return_exceptions=True)
    assert bench.queue.load().in_flight == 0
    assert await bench.scores("c", group=2) == [1.0]
    assert bench.scorer.calls == [["a"], ["c"]]


async def test_call_withdrawn_before_its_retry_is_not_retried():
    bench = Bench(retries=5)
    pausing = asyncio.Event()

    async def sleep(pause_s):
        pausing.set()
        await asyncio.Event().wait()

    bench.queue.sleep = sleep
    bench.scorer.fails = lambda group: TransientScoreError("later")
    ask = bench.submit("a")
    await pausing.wait()
    assert bench.queue.load().waiting == 1
    ask.cancel()
    await settle()
    assert len(bench.scorer.calls) == 1
    assert bench.queue.load().waiting == 0


@pytest.mark.parametrize("turns", range(6))
async def test_withdrawn_probe_frees_its_slot_at_any_time(turns):
    bench = Bench(concurrency=1, breaker_failures=1, breaker_s=1.0)
    bench.scorer.fails = lambda group: down() if group.number == 0 else None
    failing = bench.submit("x")
    await settle()
    assert bench.queue.load().is_held
    failing.cancel()
    bench.now_s += 1.0  # the next call is the probe
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


async def test_whatever_a_scorer_raises_fails_its_group():
    bench = Bench()
    bench.scorer.fails = lambda group: KeyError("bug")
    with pytest.raises(ScoreError, match=r"'scripted' \(group 7\) raised KeyError: 'bug'; fix it"):
        await bench.scores("a", group=7)
    assert bench.queue.load().failures == 1
    bench.scorer.fails = lambda group: None
    assert await bench.scores("a", group=8) == [1.0]


async def test_errors_that_end_the_run_are_raised_unchanged():
    bench = Bench()
    bench.scorer.fails = lambda group: RunFailed("its process cannot be restarted")
    with pytest.raises(RunFailed, match="its process cannot be restarted"):
        await bench.scores("a")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "'scripted' .* raised TypeError"),
        ([0.5], r"'scripted' returned 0.5 for an episode of group 0; return a ScorerResult, with"),
        ([ScorerResult(token_scores=(TokenScores(),))], "for none or all of its 0 rollouts"),
    ],
)
async def test_result_that_is_no_score_fails_its_group(returned, message):
    bench = Bench()

    async def score(group):
        return returned

    bench.scorer.score = score
    with pytest.raises(ScoreError, match=message):
        await bench.scores("a")


async def test_close_fails_everything_that_waits():
    bench = Bench(concurrency=1)
    bench.scorer.let.clear()
    asks = [bench.submit("a"), bench.submit("b", group=1)]
    await settle()
    await bench.queue.close()
    for outcome in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(outcome, RunFailed)
    with pytest.raises(RunFailed, match="closed"):
        await bench.scores("c")


async def test_wrong_number_of_results_fails_the_group():
    bench = Bench(batch=0)
    judge = bench.scorer.score

    async def judge_one(group):
        return (await judge(group))[:1]

    bench.scorer.score = judge_one
    with pytest.raises(ScoreError, match="'scripted' returned 1 results for 2 episodes of group 0"):
        await bench.scores("a", "b")
