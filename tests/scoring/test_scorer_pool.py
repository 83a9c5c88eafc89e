"""The scorer pool with real processes; nothing is faked."""

import asyncio
import contextlib
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
from scoring_service import num_lost

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.messages import WorkerProgress
from millrace.cluster.supervision.pool import RestartPolicy, WorkerPool
from millrace.core.errors import ConfigError, Filtered, RunFailed, ScoreError
from millrace.core.records import Episode, Group, Rollout, Sampling, Score, Task, Turn
from millrace.scoring.advantages import BatchAdvantages, GroupAdvantages
from millrace.scoring.functions import workers as scorer_workers
from millrace.scoring.pool import ScorerSpec, build_scorer_pool, check_scorers, function_scorer
from millrace.scoring.scheduling.scorer_queue import ScoreGate
from millrace.scoring.scorer_type import CallSettings
from millrace.scoring.shaping import build_shaping
from millrace.scoring.teachers.teacher import TrainerReference
from millrace.scoring.verifiers import Numeric, PythonTests, ReasoningGym
from millrace.tasks.loading import Puzzles, load_tasks


def group(*completions: str, number: int = 12, prompt="1+1=", **columns) -> Group:
    """One episode per completion; its tokens are 0 (prompt), 1, 2 (sampled)."""
    rollout = Rollout(
        tokens=np.arange(3, dtype=np.int32),
        mask=np.array([False, True, True]),
        engine_logprobs=np.zeros(3, np.float32),
        versions=np.array([-1, 0, 0], np.int32),
        sampling=Sampling(),
    )
    episodes = tuple(
        Episode(turns=(Turn(prompt=prompt, completion=text, finish="stop"),), rollouts=(rollout,))
        for text in completions
    )
    return Group(number=number, task=Task(prompt=prompt, columns=columns), episodes=episodes)


def function_spec(function, *, name=None, weight=1.0, **settings) -> ScorerSpec:
    named = function_scorer(function, name=name)
    return replace(named, weight=weight, overrides=settings)


def spec(function: str, **settings) -> ScorerSpec:
    return function_spec(f"rewards_for_tests:{function}", **settings)


async def shaped(pool, played: Group) -> Group:
    return await pool.shape(await pool.score(played))


def scorer_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "millrace.scoring.functions.worker" in child.cmdline()]


def sandbox_processes() -> list[psutil.Process]:
    """The processes of a sandbox: a runner, and the code under test."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "millrace.scoring.sandbox.runner" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture
async def open_pool(tmp_path, warm_fork_server):
    """Opens pools on one hub; the hub's events land in `.events`."""
    async with contextlib.AsyncExitStack() as stack:
        events: list = []
        hub = await stack.enter_async_context(
            Hub(
                log_dir=tmp_path,
                on_event=lambda _, message: events.append(message),
                preload=PRELOAD,
            )
        )

        policy = RestartPolicy(max_restarts=3, backoff_s=0.0)
        worker_pool = await stack.enter_async_context(WorkerPool(hub.launch, policy=policy))

        async def open_pool(
            *specs: ScorerSpec, num_workers: int = 1, advantages=None, shaping=None
        ):
            pool = build_scorer_pool(
                specs,
                shaping=shaping,
                advantages=advantages or GroupAdvantages(),
                num_workers=num_workers,
                worker_pool=worker_pool,
                private=tmp_path / "rewards",
                folder=tmp_path / "scorers",
            )
            return await stack.enter_async_context(pool)

        open_pool.events = events
        yield open_pool


async def test_group_gets_weighted_scores_and_advantages(open_pool, tmp_path):
    pool = await open_pool(spec("exact", weight=2.0), spec("length", name="size", weight=0.5))
    scored = await shaped(pool, group("2", "33", answer="2"))
    assert scored.scores == (
        Score(total=2.5, parts={"exact": 1.0, "size": 1.0}),
        Score(total=1.0, parts={"exact": 0.0, "size": 2.0}),
    )
    np.testing.assert_allclose(scored.advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-3)
    assert scored.number == 12
    assert scored.task.columns == {"answer": "2"}
    load = pool.loads()["size"]
    assert (load.calls, load.episodes, load.failures, load.retries) == (1, 2, 0, 0)
    assert (load.concurrency, load.in_flight, load.waiting) == (1, 0, 0)
    assert load.busy_s > 0
    assert num_lost(pool) == 0
    assert "exact sees 2 completions" in (tmp_path / "scorer-0.log").read_text()


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]])
async def test_evaluated_episode_that_ended_before_its_first_reply_has_an_empty_completion(
    open_pool, prompt
):
    pool = await open_pool(function_spec(Numeric()))
    played = group("2", prompt=prompt, answer=2)
    timed_out = Episode(turns=(), rollouts=(), ending="timeout")
    scored = await pool.evaluate(replace(played, episodes=(*played.episodes, timed_out)))
    assert [score.total for score in scored.scores] == [1.0, 0.0]


async def test_a_group_is_penalized_selected_and_filtered_and_advantages_are_of_what_is_left(
    open_pool,
):
    shaping = build_shaping(
        penalties=[{"type": "linear", "max_tokens": 4, "weight": 0.5}],
        filters=[{"type": "zero_variance"}],
        selection={"type": "roc"},
        keep=2,
        seed=0,
        scorers=["exact"],
    )
    pool = await open_pool(spec("exact"), shaping=shaping)
    scored = await shaped(pool, group("2", "33", "4", answer="2"))
    assert [score.parts for score in scored.scores] == [
        {"exact": 1.0, "linear": -0.5},
        {"exact": 0.0, "linear": -0.5},
    ]
    assert [score.total for score in scored.scores] == [0.75, -0.25]
    np.testing.assert_allclose(scored.advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-3)
    assert pool.tokens_wasted == {"unselected": 2}
    with pytest.raises(Filtered, match="zero_variance"):
        await shaped(pool, group("2", "2", answer="2"))
    assert pool.tokens_wasted == {"unselected": 2, "zero_variance": 4}


async def test_chat_tasks_are_passed_as_messages(open_pool):
    pool = await open_pool(spec("echo_shapes"))
    chat = [{"role": "user", "content": "1+1?"}]
    scored = await shaped(
        pool, group("2", "33", prompt=chat, answer="2", meta={"level": [1, None]})
    )
    assert [score.total for score in scored.scores] == [1.0, 1.0]


async def test_verifiers_score_in_the_workers_and_leave_nothing_behind(open_pool):
    hasty = PythonTests(column="hasty", time_limit_s=60.0)
    pool = await open_pool(
        function_spec(Numeric()),
        function_spec(PythonTests(time_limit_s=20.0)),
        function_spec(hasty, name="hasty", timeout_s=2.0),
    )
    pair = [["", "2"]]
    scored = await shaped(pool, group("print(2)", "print(3)", answer="2", tests=pair, hasty=None))
    assert scored.scores == (
        Score(total=2.0, parts={"numeric": 1.0, "python_tests": 1.0, "hasty": None}),
        Score(total=0.0, parts={"numeric": 0.0, "python_tests": 0.0, "hasty": None}),
    )
    endless = group("while True: 2", answer="2", tests=None, hasty=pair, number=2)
    scoring = asyncio.create_task(shaped(pool, endless))
    async with asyncio.timeout(20):
        while len(found := sandbox_processes()) < 2:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        with pytest.raises(ScoreError, match=r"'hasty' took longer than 2 s on group 2"):
            await scoring
        while any(process.is_running() for process in found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # they die with the worker


async def test_puzzle_answers_are_scored_in_the_workers(open_pool):
    pytest.importorskip("reasoning_gym")
    (task,) = load_tasks(Puzzles(dataset="leg_counting", size=1))
    pool = await open_pool(function_spec(ReasoningGym()))
    right = f"<answer>{task.columns['answer']}</answer>"
    scored = await shaped(pool, group(right, "no idea", prompt=task.prompt, **task.columns))
    assert [score.total for score in scored.scores] == [1.0, 0.0]


async def test_score_of_none_is_left_out_of_the_total(open_pool):
    pool = await open_pool(spec("only_short"), spec("length"))
    scored = await shaped(pool, group("2", "33"))
    assert scored.scores == (
        Score(total=2.0, parts={"only_short": 1.0, "length": 1.0}),
        Score(total=2.0, parts={"only_short": None, "length": 2.0}),
    )


async def test_an_episode_to_which_no_scorer_applies_is_an_error(open_pool):
    pool = await open_pool(spec("only_short"), spec("nothing"))
    with pytest.raises(
        ScoreError, match="No scorer applied to episode 1 of group 12: all of only_sho"
    ):
        await shaped(pool, group("2", "33"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("raises", r"(?m)^Reward 'raises' raised ValueError: cannot judge this \(group 12\)\.$"),
        ("raises_async", r"(?m)^Reward 'raises_async' raised KeyError: 'result' \(group 12\)\.$"),
        ("leaves_async", r"(?m)^Reward 'leaves_async' raised SystemExit: 1 \(group 12\)\.$"),
        (
            "too_few",
            r"(?m)^Reward 'too_few' returned 1 values for 2 completions; .* \(group 12\)\.$",
        ),
        (
            "nan",
            r"(?m)^Reward 'nan' returned nan \(float\) for completion 0; return .* \(group 12\)\.$",
        ),
    ],
)
async def test_failing_function_fails_its_group_and_keeps_its_worker(open_pool, name, sentence):
    pool = await open_pool(spec(name), spec("length"))
    with pytest.raises(ScoreError, match=sentence) as caught:
        await shaped(pool, group("2", "33"))
    if name.startswith("raises"):
        assert "rewards_for_tests.py" in "".join(caught.value.__notes__)
    with pytest.raises(ScoreError, match=sentence):
        await shaped(pool, group("2", "33"))
    load = pool.loads()[name]
    assert (load.failures, load.calls, load.episodes) == (2, 2, 0)
    assert num_lost(pool) == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "hangs_on_x",
            r"'hangs_on_x' took longer than 0.5 s on group 12; make it faster, or raise",
        ),
        ("exits_on_x", r"'exits_on_x' lost its process on group 12: Worker 'scorer-0' .*3"),
        ("leaves_on_x", r"'leaves_on_x' lost its process on group 12: "),
        ("segfaults_on_x", r"'segfaults_on_x' lost its process on group 12: .*SEGV"),
    ],
)
async def test_function_that_crashes_its_process_costs_one_group(open_pool, name, sentence):
    timeout_s = 0.5 if name == "hangs_on_x" else 30.0
    pool = await open_pool(spec(name, timeout_s=timeout_s, retries=0))
    bad = asyncio.create_task(shaped(pool, group("x", "x")))
    await asyncio.sleep(0.05)
    # These wait for the only worker, then for its replacement.
    good = [asyncio.create_task(shaped(pool, group("a", "b", number=n))) for n in range(3)]
    with pytest.raises(ScoreError, match=sentence):
        await bad
    for scored in await asyncio.gather(*good):
        assert [score.total for score in scored.scores] == [1.0, 1.0]
    assert num_lost(pool) == 1
    assert pool.loads()[name].lost == pool.loads()[name].failures == 1


async def test_process_that_dies_while_idle_is_restarted_and_costs_nothing(open_pool):
    pool = await open_pool(spec("length"))
    (process,) = scorer_processes()
    process.kill()
    await asyncio.sleep(0.2)
    assert [score.total for score in (await shaped(pool, group("a", "bb"))).scores] == [
        1.0,
        2.0,
    ]
    assert num_lost(pool) == 1
    assert pool.loads()["length"].retries == 0


async def test_process_killed_during_a_call_costs_one_retry(open_pool):
    pool = await open_pool(spec("sleeps"))
    scoring = asyncio.create_task(shaped(pool, group("0.5", "0.5")))
    await asyncio.sleep(0.1)
    (process,) = scorer_processes()
    process.kill()
    assert [score.total for score in (await scoring).scores] == [0.5, 0.5]
    assert num_lost(pool) == 1
    load = pool.loads()["sleeps"]
    assert (load.calls, load.retries, load.failures) == (2, 1, 0)


async def test_a_blocking_function_does_not_block_the_loop(open_pool):
    pool = await open_pool(spec("sleeps"))
    gaps: list[float] = []

    async def tick():
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await shaped(pool, group("0.8", "0.8"))
    ticking.cancel()
    assert len(gaps) > 20
    assert max(gaps) < 0.6


async def test_sync_functions_run_one_at_a_time_on_each_worker(open_pool):
    pool = await open_pool(spec("sleeps"), num_workers=2)
    start = time.monotonic()
    scoring = [asyncio.create_task(shaped(pool, group("0.3", "0.3", number=n))) for n in range(4)]
    await asyncio.sleep(0.1)
    load = pool.loads()["sleeps"]
    assert (load.concurrency, load.in_flight, load.waiting) == (2, 2, 2 * 2)
    await asyncio.gather(*scoring)
    assert time.monotonic() - start >= 0.6


async def test_calls_get_the_next_free_worker_in_order_of_arrival(open_pool, tmp_path):
    pool = await open_pool(spec("sleeps", name="first"), spec("sleeps", name="second"))
    first, second = pool.scorers
    done: list[str] = []

    async def call(scorer):
        await scorer.score(group("0.1"))
        done.append(scorer.name)

    await asyncio.gather(*(call(scorer) for scorer in (first, second, second, first)))
    assert done == ["first", "second", "second", "first"]


async def test_async_functions_share_a_worker(open_pool):
    pool = await open_pool(spec("sleeps_async"), num_workers=2)
    start = time.monotonic()
    scored = await asyncio.gather(*(shaped(pool, group("0.5", "0.5", number=n)) for n in range(20)))
    assert time.monotonic() - start < 5.0  # sequential calls would take 10 s
    assert len({score.total for one in scored for score in one.scores}) == 1  # one process id


async def test_async_calls_beyond_the_limit_wait_for_a_slot(open_pool, monkeypatch):
    monkeypatch.setattr(scorer_workers, "CALLS_PER_WORKER", 2)
    pool = await open_pool(spec("sleeps_async", concurrency=9), num_workers=2)
    scoring = [asyncio.create_task(shaped(pool, group("0.3", number=n))) for n in range(6)]
    await asyncio.sleep(0.1)
    workers = pool.scorers[0].workers
    assert [replica.num_calls for replica in workers._replicas] == [2, 2]
    await asyncio.gather(*scoring)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_sync_function_runs_alone_on_its_worker(open_pool, order):
    pool = await open_pool(spec("sleeps_async"), spec("sleeps"))
    calls = [asyncio.create_task(pool.scorers[index].score(group("0.3"))) for index in order]
    await asyncio.sleep(0.1)
    assert [replica.num_calls for replica in pool.workers._replicas] == [1]
    await asyncio.gather(*calls)


async def test_a_stream_of_async_calls_does_not_starve_a_sync_one(open_pool):
    pool = await open_pool(spec("sleeps_async"), spec("sleeps"))
    sleepy, sync = pool.scorers
    stream: list[asyncio.Task] = []

    async def keep_coming():
        for number in range(100):
            stream.append(asyncio.create_task(sleepy.score(group("0.3", number=number))))
            await asyncio.sleep(0.05)

    coming = asyncio.create_task(keep_coming())
    await asyncio.sleep(0.1)
    (result,) = await sync.score(group("0.1"))
    assert result.score == 0.1
    assert not coming.done()  # it did not wait for the last async call
    coming.cancel()
    await asyncio.gather(*stream)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [("x", "lost its process on group 9"), ("o", r"took longer than 1.5 s on group 9")],
)
async def test_calls_that_share_a_process_survive_the_one_that_crashes_it(open_pool, bad, sentence):
    pool = await open_pool(spec("misbehaves_async", timeout_s=1.5, retries=0))
    culprit = asyncio.create_task(shaped(pool, group(bad, number=9)))
    await asyncio.sleep(1.2 if bad == "o" else 0.0)  # the others run when it times out
    others = [asyncio.create_task(shaped(pool, group("a", number=n))) for n in range(2)]
    with pytest.raises(ScoreError, match=sentence):
        await culprit
    assert [one.scores[0].total for one in await asyncio.gather(*others)] == [1.0, 1.0]
    assert pool.loads()["misbehaves_async"].failures == 1


async def test_cancelled_caller_does_not_disturb_the_process(open_pool):
    pool = await open_pool(spec("sleeps"))
    running = asyncio.create_task(shaped(pool, group("0.4")))
    waiting = asyncio.create_task(shaped(pool, group("5")))
    await asyncio.sleep(0.1)
    running.cancel()
    waiting.cancel()
    start = time.monotonic()
    scored = await shaped(pool, group("0.01"))
    assert time.monotonic() - start > 0.2  # after the abandoned call, on the same worker
    assert scored.scores[0].total == 0.01
    load = pool.loads()["sleeps"]
    assert (num_lost(pool), load.waiting, load.failures) == (0, 0, 0)


async def test_sync_functions_may_use_signals_and_their_own_event_loop(open_pool):
    pool = await open_pool(spec("own_loop_and_signals"))
    assert (await shaped(pool, group("a"))).scores[0].total == 1.0


async def test_closures_and_lambdas_run_in_the_workers(open_pool):
    bonus = 5.0

    def closure(completions):
        return [bonus + len(c) for c in completions]

    async def judge(completions):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    pool = await open_pool(
        function_spec(closure),
        function_spec(lambda completions: [0.5 for _ in completions]),
        # Only its result shows that it is async.
        function_spec(lambda completions: judge(completions), name="judge"),
    )
    scored = await shaped(pool, group("a", "bb"))
    assert [scorer.name for scorer in pool.scorers] == ["closure", "lambda", "judge"]
    assert [score.total for score in scored.scores] == [7.5, 8.5]


async def test_the_timeline_shows_what_a_worker_runs(open_pool):
    pool = await open_pool(spec("sleeps"))
    await shaped(pool, group("0.6"))
    await asyncio.sleep(0.4)
    spans = [
        span
        for event in open_pool.events
        if isinstance(event, WorkerProgress)
        for span in event.spans
    ]
    busy = [span for span in spans if span.name == "sleeps"]
    assert all(span.busy and span.worker == "scorer-0" for span in busy)
    assert 0.55 < sum(span.end_s - span.start_s for span in busy) < 1.5
    assert [span.busy for span in spans if span.name == "no work"] != []


async def test_closing_while_a_function_hangs_leaves_no_process(open_pool):
    pool = await open_pool(spec("hangs_on_x"), num_workers=2)
    hanging = asyncio.create_task(shaped(pool, group("x")))
    queued = [asyncio.create_task(shaped(pool, group("x", number=n))) for n in range(3)]
    await asyncio.sleep(0.1)
    processes = scorer_processes()
    assert len(processes) == 2
    start = time.monotonic()
    await pool.close()
    assert time.monotonic() - start < 4.0
    assert not any(process.is_running() for process in processes)
    for outcome in await asyncio.gather(hanging, *queued, return_exceptions=True):
        assert isinstance(outcome, RunFailed | ScoreError)
    with pytest.raises(RunFailed, match="The scorers are closed"):
        await shaped(pool, group("a"))


async def test_run_ends_if_scorer_processes_cannot_be_restarted(open_pool, tmp_path):
    file = tmp_path / "fleeting_rewards.py"
    file.write_text("import os\ndef crash(completions):\n    os._exit(1)\n")
    pool = await open_pool(function_spec(f"{file}:crash", retries=0))
    file.unlink()
    first = asyncio.create_task(shaped(pool, group("a")))
    second = asyncio.create_task(shaped(pool, group("b")))
    with pytest.raises(ScoreError, match="'crash' lost its process"):
        await first
    with pytest.raises(RunFailed, match=r"No scorer process is left: .*fleeting_rewards.py"):
        await second
    with pytest.raises(RunFailed, match="No scorer process is left"):
        await shaped(pool, group("c"))


async def test_batch_advantages_are_computed_when_the_step_is_known(open_pool):
    pool = await open_pool(spec("length"), advantages=BatchAdvantages(epsilon=0.0))
    groups = [
        await shaped(pool, group("a", "aaa")),
        await shaped(pool, group("aaaaa", "aaa")),
    ]
    assert [g.advantages.tolist() for g in groups] == [[1.0, 3.0], [5.0, 3.0]]
    found = pool.with_batch_advantages(groups)
    # Mean 3; squares 4, 0, 4, 0 over 3.
    one = 2 / (8 / 3) ** 0.5
    assert [g.advantages.tolist() for g in found] == [
        pytest.approx([-one, 0.0]),
        pytest.approx([one, 0.0]),
    ]


async def test_estimator_that_raises_fails_the_group(open_pool):
    def halves(group):
        return [1 / 0]

    pool = await open_pool(spec("length"), advantages=halves)
    with pytest.raises(ScoreError, match=r"halves' raised ZeroDivisionError: .*; fix it"):
        await shaped(pool, group("a"))


async def test_advantages_must_be_finite_and_one_per_episode(open_pool):
    too_many = await open_pool(spec("length"), advantages=lambda group: np.zeros(3))
    with pytest.raises(ScoreError, match=r"advantages of group 12 are .*each of its 1 episodes"):
        await shaped(too_many, group("a"))


class OnlyTokens:
    """A scorer type that returns no scores of episodes."""

    default_name = "only_tokens"

    def call_settings(self, *, num_workers):
        return CallSettings()

    def check(self, tasks, *, name):
        pass

    def build(self, *, name, weight, calls, context):
        return TrainerReference(name=name, weight=weight)


class WrongModel(TrainerReference):
    async def start(self):
        raise ConfigError("the model does not fit")

    async def close(self):
        pass


class OfWrongModel(OnlyTokens):
    def build(self, *, name, weight, calls, context):
        return WrongModel(name=name, weight=weight)


async def test_scorer_that_cannot_start_raises_its_own_error(open_pool):
    with pytest.raises(ConfigError, match="the model does not fit"):
        await open_pool(ScorerSpec(type=OfWrongModel(), name="model"))


SILENT = ScorerSpec(type=OnlyTokens(), name="silent")
GATED = replace(spec("exact"), gate=ScoreGate(scorer="silent", comparison=">=", limit=0.5))


@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        ([spec("exact"), spec("exact")], "Two scorers are named 'exact'; give each a different"),
        ([spec("exakt", name="exact")], "has no 'exakt'"),
        ([GATED, SILENT], "'exact' waits for the score of 'silent', which scores tokens alone"),
    ],
)
def test_wrong_scorer_settings_are_refused_before_the_start(specs, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        build_scorer_pool(
            specs,
            advantages=GroupAdvantages(),
            num_workers=1,
            worker_pool=WorkerPool(lambda name, module: pytest.fail("no worker may start")),
            private=tmp_path,
            folder=tmp_path,
        )


def test_run_without_scorers_is_refused_unless_the_environment_gives_rewards():
    check_scorers([], [], may_be_empty=True)
    with pytest.raises(ConfigError, match=r"The run has no scorer; add a \[\[scorers\]\] table"):
        check_scorers([], [])


def test_missing_column_is_refused_before_the_start():
    with pytest.raises(ConfigError, match="Reward 'exact' needs the column 'answer'"):
        check_scorers([spec("length"), spec("exact")], [Task(prompt="a")])
