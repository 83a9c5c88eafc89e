"""A remote teacher: the /score route on a real socket, and its client."""

import base64
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence

import aiohttp
import numpy as np
import pytest
from architectures import VOCAB, tiny_model
from engine_rig import letter_tokenizer, save_model
from forked_command import start_command
from scoring_service import FakeService, running

from millrace.core.errors import ConfigError, ScoreError, TransientScoreError
from millrace.core.records import ScoreRequest, TokenLogprobs
from millrace.environments.tools.calls import FORMATS
from millrace.inference.embedded.scoring import ScoringEngine
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.directory import vocabulary_checksum
from millrace.scoring.services.endpoint import Endpoint
from millrace.scoring.teachers import process
from millrace.scoring.teachers.process import MAX_SEQUENCES, RemoteTeacher
from millrace.serving.api.openapi import Health
from millrace.serving.api.replies import PIECE_BYTES
from millrace.serving.api.score import MAX_SENT, MAX_TOP, ScorePool
from millrace.serving.clients import TokenQuotas
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app

VOCABULARY = vocabulary_checksum(letter_tokenizer())
KEY = "a-key"
HEALTH = Health(status="ok", engines=0, serving=0)


def local_engine() -> ScoringEngine:
    model = tiny_model("qwen3")
    model.set_attn_implementation(PACKED_ATTENTION)
    return ScoringEngine(model)


class LocalReader:
    """Computes what a teacher process would, in this process."""

    def __init__(self) -> None:
        self.engine = local_engine()
        self.calls: list[int] = []

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        self.calls.append(len(requests))
        (scored,) = self.engine.score([list(requests)], version=None)
        return scored


@contextlib.asynccontextmanager
async def serving(
    reader: LocalReader, *, vocabulary: str = VOCABULARY, max_tokens: int | None = None
) -> AsyncIterator[str]:
    served = ServedModel(
        None,
        tokenizer=letter_tokenizer(),
        name="teacher",
        max_context=64,
        tool_format=FORMATS["hermes"],
        metrics=ServerMetrics(),
        quotas=TokenQuotas(max_tokens, now_s=lambda: 0.0),  # never full again
    )
    model = {"vocabulary": vocabulary, "num_tokens": VOCAB, "max_context": 64}
    score_pool = ScorePool(processes=[reader], **model, timeout_s=9)  # pyright: ignore
    app = make_app(
        served, keys=[KEY], limits=ServerLimits(), health=lambda: HEALTH, score_pool=score_pool
    )
    async with http_listener(app, host="127.0.0.1", port=0) as url:
        yield f"{url}/score"
    served.close()


@contextlib.asynccontextmanager
async def asking(url: str, monkeypatch: pytest.MonkeyPatch, *, num_top: int = 3):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    headers = {"Authorization": "Bearer env:TEACHER_KEY"}
    endpoint = Endpoint(url, headers=headers, timeout_s=9, scorer="teacher")
    teacher = RemoteTeacher(
        name="teacher", endpoint=endpoint, vocabulary=VOCABULARY, vocab_size=VOCAB, num_top=num_top
    )
    try:
        yield teacher
    finally:
        await teacher.close()


def requests() -> list[ScoreRequest]:
    """Two sequences of one group with a shared prefix; one has two turns."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB, 8)
    tokens = [np.concatenate([prompt, rng.integers(3, VOCAB, n)]).astype(np.int32) for n in (9, 20)]
    places = [np.arange(8, 17), np.concatenate([np.arange(8, 12), np.arange(20, 26)])]
    return [
        ScoreRequest(tokens=t, positions=p.astype(np.int32), top_k=k, temperature=0.7)
        for t, p, k in zip(tokens, places, (3, 0), strict=True)
    ]


def assert_equal(scored: list[TokenLogprobs], asked: list[ScoreRequest]) -> None:
    (expected,) = local_engine().score([asked], version=None)
    for one, other in zip(scored, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(one.top_ids, other.top_ids)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=1e-5)
        assert one.version is None


async def test_remote_teacher_equals_a_local_teacher(monkeypatch):
    async with serving(LocalReader()) as url, asking(url, monkeypatch) as teacher:
        await teacher.start()
        assert_equal(await teacher.score(requests(), timeout_s=9), requests())


async def test_large_score_calls_are_split_into_several_requests(monkeypatch):
    monkeypatch.setattr(process, "MAX_TOKENS", 40)
    reader = LocalReader()
    async with serving(reader) as url, asking(url, monkeypatch) as teacher:
        await teacher.start()
        several = [*requests(), *requests()]
        assert_equal(await teacher.score(several, timeout_s=9), several)
    assert reader.calls == [1, 1, 1, 1]


class LikelyReader(LocalReader):
    """Knows as many likeliest tokens as it is asked for."""

    async def score(self, requests, *, timeout_s: float) -> list[TokenLogprobs]:
        return [
            TokenLogprobs(
                logprobs=np.arange(count := len(request.positions), dtype=np.float32),
                top_ids=np.arange(count * request.top_k, dtype=np.int32).reshape(
                    count, request.top_k
                ),
                top_logprobs=np.ones((count, request.top_k), np.float32),
                version=None,
            )
            for request in requests
        ]


async def test_large_answers_are_sent_in_pieces():
    tokens = {"tokens": [3] * 64, "ranges": [[1, 64]], "top_k": 500}
    async with (
        serving(LikelyReader()) as url,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http,
        http.post(url, json={"sequences": [tokens, {**tokens, "top_k": 1}]}) as response,
    ):
        pieces = [piece async for piece, _ in response.content.iter_chunks()]
    assert max(map(len, pieces)) < 5 * PIECE_BYTES < sum(map(len, pieces)) / 3
    large, small = json.loads(b"".join(pieces))["sequences"]
    for row, top_k in ((large, 500), (small, 1)):
        logprobs, ids = (base64.b64decode(row[name]) for name in ("logprobs", "top_ids"))
        assert np.frombuffer(logprobs, "<f4").tolist() == list(range(63))
        assert np.frombuffer(ids, "<i4").tolist() == list(range(63 * top_k))


async def test_sequences_and_numbers_of_one_answer_are_bounded(monkeypatch):
    one = {"tokens": [3, 3], "ranges": [[1, 2]]}
    full = {"tokens": [3] * 64, "ranges": [[1, 64]], "top_k": MAX_TOP}
    count = MAX_SENT // (63 * (1 + 2 * MAX_TOP)) + 1
    async with serving(LikelyReader()) as url, asking(url, monkeypatch) as teacher:
        await teacher.start()
        for sequences, words in (
            ([one] * (MAX_SEQUENCES + 1), f"at most {MAX_SEQUENCES} items"),
            ([full] * count, f"numbers, but at most {MAX_SENT} are sent; lower top_k"),
        ):
            with pytest.raises(ScoreError, match=words):
                await teacher.endpoint.post({"sequences": sequences})
        few = ScoreRequest(tokens=np.array([3, 3], np.int32), positions=np.array([1], np.int32))
        assert len(await teacher.score([few] * (MAX_SEQUENCES + 1), timeout_s=9)) > MAX_SEQUENCES


async def test_model_with_another_tokenizer_is_refused_at_the_start(monkeypatch):
    async with (
        serving(LocalReader(), vocabulary="another") as url,
        asking(url, monkeypatch) as teacher,
    ):
        with pytest.raises(
            ConfigError, match="'teacher': the tokenizer of the model at its url differs"
        ):
            await teacher.start()


async def test_top_k_above_the_vocabulary_is_refused_at_the_start(monkeypatch):
    async with serving(LocalReader()) as url, asking(url, monkeypatch, num_top=VOCAB) as teacher:
        with pytest.raises(ConfigError, match=f"knows {VOCAB} tokens, and top_k = {VOCAB}"):
            await teacher.start()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ScoreRequest(
                tokens=np.full(80, 3, np.int32), positions=np.arange(70, 80, dtype=np.int32)
            ),
            "scored up to token 80, but the context is limited to 64",
        ),
        (
            ScoreRequest(tokens=np.full(8, VOCAB, np.int32), positions=np.array([4], np.int32)),
            f"has token {VOCAB}, but the model knows {VOCAB}",
        ),
        (
            ScoreRequest(tokens=np.full(8, 3, np.int32), positions=np.array([0], np.int32)),
            "greater than or equal to 1",
        ),
    ],
)
async def test_error_of_the_server_fails_the_group(monkeypatch, asked, said):
    async with serving(LocalReader()) as url, asking(url, monkeypatch) as teacher:
        await teacher.start()
        with pytest.raises(ScoreError, match=said) as raised:
            await teacher.score([asked], timeout_s=9)
        assert not isinstance(raised.value, TransientScoreError)


async def test_client_does_not_see_how_the_process_was_lost(monkeypatch):
    class LostReader(LocalReader):
        async def score(self, requests, *, timeout_s: float) -> list[TokenLogprobs]:
            raise ScoreError("Teacher 'a' lost its process twice: see /home/me/logs/a.log.")

    async with serving(LostReader()) as url, asking(url, monkeypatch) as teacher:
        await teacher.start()
        with pytest.raises(TransientScoreError, match=r"The engine failed\.") as raised:
            await teacher.score(requests(), timeout_s=9)
        assert "/home" not in str(raised.value)


MODEL_INFO = {"vocabulary": VOCABULARY, "num_tokens": VOCAB, "max_context": 64}
ZERO, NAN = "AAAAAA==", "AADAfw=="  # one float32 each
SCORED = {"logprobs": ZERO, "top_ids": "", "top_logprobs": "", "version": None}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "an invalid answer: Object missing required field `vocabulary`"),
        ({**MODEL_INFO, "sequences": []}, "answered for 0 sequences instead of 1"),
        ({**MODEL_INFO, "sequences": [{**SCORED, "logprobs": 3}]}, "Expected `bytes`, got `int`"),
        ({**MODEL_INFO, "sequences": [{**SCORED, "logprobs": "?"}]}, "Invalid base64"),
        ({**MODEL_INFO, "sequences": [{**SCORED, "logprobs": ZERO[:-2]}]}, "Invalid base64"),
        ({**MODEL_INFO, "sequences": [{**SCORED, "logprobs": ""}]}, "0 bytes instead of 4"),
        (
            {**MODEL_INFO, "sequences": [{**SCORED, "logprobs": NAN}]},
            "logprobs that are not finite",
        ),
    ],
)
async def test_invalid_answer_is_retried(monkeypatch, answer, said):
    request = ScoreRequest(tokens=np.full(8, 3, np.int32), positions=np.array([4], np.int32))
    service = FakeService(lambda _: answer)
    service.first.append({**MODEL_INFO, "sequences": []})  # answers start()
    async with running(service), asking(service.url, monkeypatch) as teacher:
        await teacher.start()
        with pytest.raises(TransientScoreError, match=re.escape(said)):
            await teacher.score([request], timeout_s=9)


@pytest.fixture
def served_url(tmp_path, warm_fork_server) -> Iterator[str]:
    """A server that reads and never answers."""
    save_model(tmp_path / "model")
    options = ["--engines", "0", "--scorers", "1", "--port", "0", "--log-dir", str(tmp_path)]
    options += ["--placement.engines", "cpu"]
    env = {**os.environ, "MILLRACE_API_KEY": KEY}
    process = start_command("serve", str(tmp_path / "model"), *options, env=env)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found
    yield found[0]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0  # as services end


@pytest.mark.slow
async def test_millrace_serve_equals_a_local_teacher(monkeypatch, served_url):
    async with asking(f"{served_url}/score", monkeypatch) as teacher:
        await teacher.start()
        assert_equal(await teacher.score(requests(), timeout_s=60), requests())


async def test_scored_tokens_are_charged_against_the_quota():
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"sequences": [{"tokens": [5, 6, 7], "ranges": [[1, 3]]}]}
    async with serving(LocalReader(), max_tokens=5) as url, aiohttp.ClientSession() as http:
        replies = [await http.post(url, json=body, headers=headers) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
