"""EngineWorker on a link whose other end is the test."""

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from engine_rig import make_engine, make_request, save_model, weights
from queue_link import FakeLink, in_thread, run_beside

from millrace.cluster.messages import (
    AbortRequests,
    Completed,
    Done,
    Generate,
    GenerateDone,
    LoadAdapter,
    Pause,
    Resume,
    ScoreTokens,
    StartEngine,
    StartScorer,
    Stop,
    Swapped,
    SwapWeights,
    TokensScored,
    WorkerProgress,
)
from millrace.core.errors import ConfigError, MillraceError, TaskError, WeightError
from millrace.core.records import ScoreRequest, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference import worker as engine_worker
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.worker import EngineWorker
from millrace.weights.backends import PackingSender
from millrace.weights.transport import make_sender


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture
def link() -> Iterator[FakeLink]:
    """To a worker that waits for StartEngine."""
    link = FakeLink()
    with run_beside(link, "engine-0", StartEngine, engine_worker._start):
        yield link
        link.call(Stop())


@pytest.fixture
def sender() -> Iterator[PackingSender]:
    sender = make_sender("shm", dtype=torch.float32)
    yield sender
    sender.close()


def start(link: FakeLink, model_path: Path, **engine: Any) -> None:
    config = {
        "model": {"path": str(model_path)},
        "engine": {"options": {"block_tokens": 4}, **engine},
        "cluster": {"threads": 1},
        "placement": {"engines": "cpu"},
    }
    link.call(StartEngine(config=config, model_path=str(model_path), version=3)).result()


def long_request(id: str = "long") -> Generate:
    """About 240 steps: long enough for whatever the test does meanwhile."""
    return Generate(request=make_request(id, max_new_tokens=240, temperature=0.0))


class GatedReceiver:
    """Hands out the weights whose seed is the version, once it is opened; the last tensor of some
    as something else."""

    def __init__(self, spoil: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = {}) -> None:
        self._gate = threading.Event()
        self._spoil = spoil
        self.lost = ""  # location of updates whose trainer died
        self.staged: list[int] = []
        self.is_closed = False

    def open(self) -> None:
        self._gate.set()

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        self.staged.append(update.version)
        assert self._gate.wait(20)
        if update.location and update.location == self.lost:
            raise WeightError("The trainer cannot be reached.")
        tensors = weights(seed=update.version)
        if update.version in self._spoil:
            last = list(tensors)[-1]
            tensors[last] = self._spoil[update.version](tensors[last])
        return tensors

    def close(self) -> None:
        self.is_closed = True


def update_of(version: int) -> WeightUpdate:
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="gated", location=""
    )


@contextmanager
def serving(
    link: FakeLink, receiver: GatedReceiver, engine: EmbeddedEngine | None = None
) -> Iterator[None]:
    """An EngineWorker in a thread of its own, from version 0."""
    worker = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=engine or make_engine(max_context=256),
        receiver=receiver,
        timeline=Timeline("engine-0"),
    )
    with in_thread(worker.serve):
        yield
        link.call(Stop()).result()


def damaged(update: WeightUpdate) -> WeightUpdate:
    return dataclasses.replace(update, checksum=update.checksum ^ 1)


def test_worker_answers_requests_and_reports_spans_and_counters(link: FakeLink, model_path: Path):
    start(link, model_path)
    calls = [
        link.call(Generate(request=make_request(str(i), n=2, seed=i, max_new_tokens=30)))
        for i in range(3)
    ]
    completions = [c for call in calls for c in call.completions()]
    assert len(completions) == 6
    assert {version for c in completions for version in c.versions} == {3}
    assert link.call(Stop()).result() == Done()
    progress = [event for event in link.events if isinstance(event, WorkerProgress)]
    spans = [span for event in progress for span in event.spans]
    assert {"load", "generate", "no work"} <= {span.name for span in spans}
    assert all(span.busy == (span.name != "no work") for span in spans)
    for earlier, later in itertools.pairwise(spans):
        assert later.start_s == earlier.end_s
    counters = progress[-1].counters
    assert counters["generated_tokens"] == sum(len(c.tokens) for c in completions)
    assert counters["prefill_tokens"] + counters["cached_tokens"] == 3 * 6
    assert counters["running"] == counters["waiting"] == counters["swaps"] == 0
    assert counters["free_blocks"] > 0


def test_published_weights_become_visible(link: FakeLink, model_path: Path, sender: PackingSender):
    start(link, model_path)
    update = sender.publish(4, weights(seed=1))
    swapped = link.call(SwapWeights(update=update)).result()
    assert swapped.version == 4
    assert swapped.stage_ms > 0
    assert swapped.gap_ms > 0
    (completion,) = link.call(Generate(request=make_request())).result().completions.values()
    assert set(completion.versions) == {4}


def test_idle_engine_captures_what_launches_lacked():
    sizes: dict[str, Any] = {"max_sequences": 50, "num_blocks": 1024, "prefill_tokens": 256}
    engine = make_engine(eos_ids=(), decode_steps=4, defers_captures=True, **sizes)
    engine.warm_up()
    link, loop = FakeLink(), engine._decode_loop
    assert loop is not None
    before = {shape.num_rows for shape in loop._steps}
    with serving(link, GatedReceiver(), engine):
        generated = link.call(Generate(request=make_request(n=20)))
        assert len(generated.completions()) == 20
        for _ in range(2):  # when the second is answered, the engine has been idle
            link.call(AbortRequests(ids=[])).result()
    assert {shape.num_rows for shape in loop._steps} == before | {24}


def test_damaged_update_is_refused_and_old_version_still_serves(
    link: FakeLink, model_path: Path, sender: PackingSender
):
    start(link, model_path)
    update = sender.publish(4, weights(seed=1))
    with pytest.raises(WeightError, match="checksum"):
        link.call(SwapWeights(update=damaged(update))).result()
    (completion,) = link.call(Generate(request=make_request())).result().completions.values()
    assert set(completion.versions) == {3}
    assert link.call(SwapWeights(update=update)).result().version == 4


def test_decoding_continues_while_weights_are_staged():
    link, receiver = FakeLink(), GatedReceiver()
    with serving(link, receiver):
        swap = link.call(SwapWeights(update=update_of(1)))
        first = link.call(Generate(request=make_request("first"))).result().completions.values()
        generating = link.call(long_request())
        receiver.open()
        assert swap.result() == Swapped(version=1, stage_ms=ANY, gap_ms=ANY)
        (spanning,) = generating.result().completions.values()
    assert {version for completion in first for version in completion.versions} == {0}
    assert spanning.versions[-1] == 1
    assert (np.diff(spanning.versions) >= 0).all()


def test_newer_update_supersedes_one_that_is_staging():
    link, receiver = FakeLink(), GatedReceiver()
    with serving(link, receiver):
        calls = [link.call(SwapWeights(update=update_of(version))) for version in (1, 3, 2)]
        link.call(Generate(request=make_request())).result()  # by now, all three have arrived
        receiver.open()
        assert [call.result().version for call in calls] == [3, 3, 3]
        assert link.call(SwapWeights(update=update_of(2))).result().version == 3
        (completion,) = link.call(Generate(request=make_request())).result().completions.values()
    assert set(completion.versions) == {3}
    assert receiver.staged == [1, 3]  # 1 had begun, 2 never did
    assert receiver.is_closed
    assert [e.counters["swaps"] for e in link.events if isinstance(e, WorkerProgress)][-1] == 1


def test_version_of_a_dead_trainer_does_not_keep_out_the_same_version_of_the_next_one():
    link, receiver = FakeLink(), GatedReceiver()
    receiver.lost = "first"
    with serving(link, receiver):
        locations = ("first", "second")
        updates = [dataclasses.replace(update_of(1), location=place) for place in locations]
        calls = [link.call(SwapWeights(update=update)) for update in updates]
        link.call(Generate(request=make_request())).result()  # by now, both have arrived
        receiver.open()
        assert [call.result().version for call in calls] == [1, 1]
    assert receiver.staged == [1, 1]


def test_update_that_cannot_be_staged_is_refused_and_old_version_still_serves():
    link, receiver = FakeLink(), GatedReceiver({1: lambda tensor: tensor.to("meta")})
    receiver.open()
    with serving(link, receiver):
        with pytest.raises(WeightError, match="Version 1 cannot be prepared"):
            link.call(SwapWeights(update=update_of(1))).result()
        (completion,) = link.call(Generate(request=make_request())).result().completions.values()
    assert set(completion.versions) == {0}


def test_requests_wait_for_complete_version_after_half_applied_swap():
    # Has the right shape, dtype and device, but cannot be copied.
    link, receiver = FakeLink(), GatedReceiver({1: lambda tensor: tensor.to_sparse()})
    receiver.open()
    with serving(link, receiver):
        with pytest.raises(WeightError, match="serves nothing until a complete version"):
            link.call(SwapWeights(update=update_of(1))).result()
        generating = link.call(Generate(request=make_request()))
        assert link.call(SwapWeights(update=update_of(2))).result().version == 2
        (completion,) = generating.result().completions.values()
    assert set(completion.versions) == {2}


def test_abort_answers_request_with_its_tokens(link: FakeLink, model_path: Path):
    start(link, model_path, max_sequences=1)
    running, waiting = link.call(long_request()), link.call(long_request("second"))
    assert link.call(AbortRequests(ids=["long", "second", "gone"])).result() == Done()
    for call in (running, waiting):
        reply = call.result()
        assert isinstance(reply, GenerateDone)
        assert [completion.finish for completion in reply.completions.values()] == ["abort"]


def test_completions_are_sent_once_as_they_end(link: FakeLink, model_path: Path):
    start(link, model_path)
    request = make_request("r", n=2, seed=1, max_new_tokens=200)  # the second has 4 tokens
    call = link.call(Generate(request=request))
    reply = call.result()
    (part,) = call.parts
    assert isinstance(part, Completed)
    assert (list(part.completions), list(reply.completions)) == ([1], [0])


def test_refused_request_does_not_fail_others(link: FakeLink, model_path: Path):
    start(link, model_path, max_context=16)
    with pytest.raises(TaskError, match="has 16 tokens"):
        link.call(Generate(request=make_request(prompt=16))).result()
    assert len(link.call(Generate(request=make_request())).result().completions) == 1


def test_failed_model_load_leaves_worker_waiting_for_next_start(link: FakeLink, model_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        start(link, model_path / "nowhere")
    with pytest.raises(ConfigError, match=r"engine.max_context = 1000 exceeds the 256 tokens"):
        start(link, model_path, max_context=1000)
    with pytest.raises(ConfigError, match="does not hold one KV block"):
        start(link, model_path, options={"kv_bytes": 100})
    with pytest.raises(MillraceError, match="it expects StartEngine first"):
        link.call(Generate(request=make_request())).result()
    start(link, model_path)
    with pytest.raises(MillraceError, match="without replaceable adapters"):
        link.call(LoadAdapter(name="a", folder="a")).result()
    with pytest.raises(MillraceError, match="cannot handle StartScorer now"):
        link.call(StartScorer(functions={})).result()


def test_worker_scores_between_decode_steps_but_not_while_paused():
    link = FakeLink()
    about = ScoreRequest(
        tokens=np.arange(3, 15, dtype=np.int32),
        positions=np.arange(4, 12, dtype=np.int32),
        wants_entropies=True,
    )
    with serving(link, GatedReceiver()):
        decoding = link.call(long_request())
        reply = link.call(ScoreTokens(requests=[about])).result()
        assert isinstance(reply, TokensScored)
        (logprobs,) = reply.logprobs
        assert logprobs.entropies.shape == (8,)
        assert decoding.result().completions[0].finish == "length"
        link.call(Pause()).result()
        waiting = link.call(ScoreTokens(requests=[about]))
        with pytest.raises(queue.Empty):
            waiting.result(timeout_s=0.1)
        link.call(Resume()).result()
        again = waiting.result().logprobs[0]
        np.testing.assert_array_equal(again.logprobs, logprobs.logprobs)


def test_scoring_takes_at_most_half_of_the_time_while_sequences_are_generated():
    link, engine = FakeLink(), make_engine(max_context=256)
    spent: list[tuple[str, float]] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            if name == "score":
                time.sleep(0.02)  # several decode steps
            try:
                return call(*args, **named)
            finally:
                spent.append((name, time.perf_counter() - start_s))

        return run

    engine.step, engine.score = timed("step", engine.step), timed("score", engine.score)
    about = ScoreRequest(tokens=np.arange(3, 9, dtype=np.int32), positions=np.array([4], np.int32))
    with serving(link, GatedReceiver(), engine):
        decoding = link.call(long_request())
        scoring = [link.call(ScoreTokens(requests=[about])) for _ in range(6)]
        decoding.result()
        for each in scoring:
            each.result()
    last = max(at for at, (name, _) in enumerate(spent) if name == "step")
    owed_s = 0.0
    for name, seconds in spent[:last]:
        assert name == "step" or owed_s < 0.01
        owed_s = seconds if name == "score" else owed_s - seconds
