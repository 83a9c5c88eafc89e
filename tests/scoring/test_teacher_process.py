"""The teacher process: its main loop in this process, and a real process during swaps."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from architectures import VOCAB, tiny_model
from engine_rig import save_model, weights
from queue_link import FakeLink, run_beside
from transformers import PreTrainedModel

from millrace.cluster.hub import Hub
from millrace.cluster.messages import (
    Done,
    ScoreTokens,
    StartTeacher,
    Stop,
    Swapped,
    SwapWeights,
    TokensScored,
)
from millrace.cluster.worker import Worker
from millrace.config import load_config
from millrace.core.errors import ConfigError, MillraceError, WeightError
from millrace.core.records import ScoreRequest, TokenLogprobs
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.scoring.teachers.worker import TeacherWorker
from millrace.weights.transport import make_sender

NUM_PROMPT, NUM_SAMPLED = 8, 24


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with Hub(log_dir=tmp_path / "logs", on_event=lambda *_: None, stop_timeout_s=4.0) as hub:
        yield hub


def start_message(path: Path, *, history: dict | None = None, **settings) -> StartTeacher:
    config = load_config({"model": str(path)})
    return StartTeacher(
        config=config.model_dump(mode="json"),
        settings=asdict(LogprobModelSettings(threads=1, **settings)),
        device="cpu",
        model_path=str(path),
        history=history,
        saved_path=str(path.parent / "scorers" / "teacher.safetensors"),
    )


async def start_teacher(hub: Hub, path: Path, **settings) -> Worker:
    worker = await hub.launch("teacher-0", "millrace.scoring.teachers.worker")
    assert isinstance(await worker.call(start_message(path, **settings)), Done)
    return worker


def score_request(seed: int) -> ScoreRequest:
    rng = np.random.default_rng(seed)
    prompt = np.random.default_rng(0).integers(3, VOCAB, NUM_PROMPT)
    tokens = np.concatenate([prompt, rng.integers(3, VOCAB, NUM_SAMPLED)]).astype(np.int32)
    positions = np.arange(NUM_PROMPT, len(tokens), dtype=np.int32)
    return ScoreRequest(tokens=tokens, positions=positions, top_k=3)


def plain_logprobs(request: ScoreRequest, model: PreTrainedModel) -> np.ndarray:
    """Logprobs of plain transformers."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(request.tokens).long()[None]).logits[0]
    logprobs = logits.log_softmax(-1)[request.positions - 1]
    targets = torch.from_numpy(request.tokens[request.positions]).long()
    return logprobs.gather(1, targets[:, None]).squeeze(1).numpy()


async def ask(teacher: Worker, requests: list[ScoreRequest]) -> list[TokenLogprobs]:
    reply = await teacher.call(ScoreTokens(requests=requests), timeout_s=60)
    assert isinstance(reply, TokensScored)
    return reply.logprobs


@pytest.fixture
def link() -> Iterator[FakeLink]:
    """A link to a teacher that is not started yet."""
    link = FakeLink()
    with run_beside(link, "teacher-0", StartTeacher, TeacherWorker):
        yield link
        link.call(Stop()).result()


def test_teacher_answers_many_calls_and_refuses_unknown_messages(link, tmp_path):
    save_model(tmp_path / "model")
    with pytest.raises(
        MillraceError, match="cannot handle ScoreTokens now: it expects StartTeacher first"
    ):
        link.call(ScoreTokens(requests=[score_request(1)])).result()
    with pytest.raises(ConfigError, match="'/no/such/model' does not exist"):
        link.call(start_message(Path("/no/such/model"))).result()
    link.call(start_message(tmp_path / "model", pass_tokens=64)).result()
    asked = [[score_request(10 * i + j) for j in range(1 + i % 4)] for i in range(12)]
    calls = [link.call(ScoreTokens(requests=requests)) for requests in asked]
    for requests, call in zip(asked, calls, strict=True):
        scored = call.result().logprobs
        assert [one.version for one in scored] == [None] * len(requests)
        for one, logprobs in zip(requests, scored, strict=True):
            expected = plain_logprobs(one, tiny_model("qwen3"))
            np.testing.assert_allclose(logprobs.logprobs, expected, rtol=0, atol=1e-5)
            assert logprobs.top_ids.shape == logprobs.top_logprobs.shape == (NUM_SAMPLED, 3)
    sender = make_sender("shm", dtype=torch.float32)
    with pytest.raises(MillraceError, match="cannot handle Swap"):
        link.call(SwapWeights(update=sender.publish(1, weights(seed=1)))).result()
    sender.close()


def test_self_teacher_averages_versions_and_survives_invalid_weights(link, tmp_path):
    save_model(tmp_path / "model")
    link.call(start_message(tmp_path / "model", history={"ema": 0.5, "every": 2})).result()
    sender = make_sender("shm", dtype=torch.float32)
    first, second = (sender.publish(v, weights(seed=v)) for v in (1, 2))
    assert link.call(SwapWeights(update=first)).result().version == 0  # not due yet, only averaged
    spoiled = {name: w[..., :1] for name, w in weights(seed=1).items()}
    sender.release(1)
    with pytest.raises(WeightError):
        link.call(SwapWeights(update=sender.publish(9, spoiled))).result()
    assert link.call(SwapWeights(update=second)).result().version == 2
    sender.close()
    averaged = tiny_model("qwen3")
    with torch.no_grad():
        for name, average in averaged.named_parameters():
            average.lerp_(weights(seed=1)[name], 0.5).lerp_(weights(seed=2)[name], 0.5)
    (one,) = link.call(ScoreTokens(requests=[score_request(3)])).result().logprobs
    expected = plain_logprobs(score_request(3), averaged)
    np.testing.assert_allclose(one.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
async def test_swap_during_scoring_never_mixes_versions_in_a_sequence(hub, tmp_path):
    save_model(tmp_path / "model")
    teacher = await start_teacher(hub, tmp_path / "model", history={"lag": 0}, pass_tokens=64)
    sender = make_sender("shm", dtype=torch.float32)
    versions = range(1, 5)

    async def refresh() -> None:
        for version in versions:
            update = sender.publish(version, weights(seed=version))
            reply = await teacher.call(SwapWeights(update=update), timeout_s=60)
            assert isinstance(reply, Swapped)
            assert reply.version == version
            sender.release(version)

    requests = [score_request(seed) for seed in range(4)]
    refreshing = asyncio.create_task(refresh())
    scored: list[list[TokenLogprobs]] = []
    while not refreshing.done():  # keep several calls with several passes in flight
        scored += await asyncio.gather(*(ask(teacher, requests) for _ in range(4)))
    scored.append(await ask(teacher, requests))
    await refreshing
    sender.close()
    expected = {
        v: [plain_logprobs(p, tiny_model("qwen3", seed=v)) for p in requests]
        for v in (0, *versions)
    }
    for logprobs in scored:
        for one, *by_version in zip(logprobs, *expected.values(), strict=True):
            assert one.version is not None
            np.testing.assert_allclose(one.logprobs, by_version[one.version], rtol=0, atol=1e-5)
    seen = {one.version for logprobs in scored for one in logprobs}
    assert len(seen) > 2
    assert scored[-1][0].version == versions[-1]


@pytest.mark.parametrize("history", [{"ema": 0.5}, {"lag": 0}], ids=["ema", "lag"])
def test_restarted_self_teacher_resumes_from_its_saved_weights(tmp_path, history):
    save_model(tmp_path / "model")
    start = start_message(tmp_path / "model", history=history)
    sender = make_sender("shm", dtype=torch.float32)
    update = sender.publish(4, weights(seed=4))
    scored: list[TokenLogprobs] = []
    for is_first in (True, False):
        link = FakeLink()
        with run_beside(link, "teacher-0", StartTeacher, TeacherWorker):
            link.call(start).result()
            if is_first:
                # The run may have resumed from a checkpoint that it has removed since.
                start = msgspec.structs.replace(start, model_path=str(tmp_path / "step_3"))
                assert link.call(SwapWeights(update=update)).result().version == 4
            scored += link.call(ScoreTokens(requests=[score_request(3)])).result().logprobs
            link.call(Stop()).result()
    sender.close()
    assert [one.version for one in scored] == [4, 4]
    np.testing.assert_allclose(scored[1].logprobs, scored[0].logprobs, rtol=0, atol=1e-6)
    expected = plain_logprobs(score_request(3), tiny_model("qwen3"))
    assert np.abs(scored[1].logprobs - expected).max() > 1e-2, "differs from the starting weights"


def test_teacher_that_cannot_save_its_weights_continues(link, tmp_path, capfd):
    save_model(tmp_path / "model")
    (tmp_path / "scorers").write_text("a file where a folder is wanted")
    link.call(start_message(tmp_path / "model", history={"lag": 0})).result()
    sender = make_sender("shm", dtype=torch.float32)
    for version in (1, 2):
        update = sender.publish(version, weights(seed=version))
        assert link.call(SwapWeights(update=update)).result().version == version
        sender.release(version)
    sender.close()
    assert "teacher.safetensors cannot be written" in capfd.readouterr().err
