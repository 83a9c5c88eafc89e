"""The engine in scoring mode beside a plain forward pass of transformers."""

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model

from millrace.core.records import Kept
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.inference.embedded.scoring import ScoringEngine, lay_out, num_rows
from millrace.models.attention.packed import PACKED_ATTENTION

TOLERANCE = 1e-5


def passage_of(tokens: list[int] | np.ndarray, *, judged_from: int, **settings) -> ScoreRequest:
    tokens = np.asarray(tokens, np.int32)
    positions = np.arange(judged_from, len(tokens), dtype=np.int32)
    return ScoreRequest(tokens=tokens, positions=positions, **settings)


def random_tokens(length: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def plain_distribution(architecture: str, passage: ScoreRequest) -> torch.Tensor:
    """[n, V] logprobs at the passage's temperature, by transformers alone."""
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(passage.tokens).long()[None]).logits[0]
    return (logits[passage.positions - 1] / passage.temperature).log_softmax(-1)


def assert_read(reading: TokenLogprobs, passage: ScoreRequest, expected: torch.Tensor) -> None:
    targets = torch.from_numpy(passage.tokens[passage.positions]).long()
    chosen = expected.gather(1, targets[:, None]).squeeze(1)
    np.testing.assert_allclose(reading.logprobs, chosen, rtol=0, atol=TOLERANCE)
    top = expected.topk(passage.top_k, dim=-1)
    np.testing.assert_array_equal(reading.top_ids, top.indices)
    np.testing.assert_allclose(reading.top_logprobs, top.values, rtol=0, atol=TOLERANCE)


def engine_of(architecture: str = "qwen3", **settings) -> ScoringEngine:
    model = tiny_model(architecture)
    model.set_attn_implementation(PACKED_ATTENTION)
    return ScoringEngine(model, **settings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_says_what_plain_transformers_says(architecture):
    prompt = random_tokens(7, seed=0)
    shared = [
        passage_of(prompt + random_tokens(length, seed=length), judged_from=7, top_k=5)
        for length in (3, 1, 12)
    ]
    alone = passage_of(random_tokens(20, seed=9), judged_from=4, top_k=2, temperature=0.7)
    engine = engine_of(architecture, logprob_chunk=6)
    groups = [[alone], shared, [shared[0]]]
    for group, readings in zip(groups, engine.read(groups, version=3), strict=True):
        for passage, reading in zip(group, readings, strict=True):
            assert_read(reading, passage, plain_distribution(architecture, passage))
            assert reading.version == 3


def test_tokens_in_the_middle_of_a_passage_can_be_judged():
    tokens = np.asarray(random_tokens(15, seed=2), np.int32)
    passage = ScoreRequest(tokens=tokens, positions=np.array([3, 4, 10], np.int32), top_k=3)
    [[reading]] = engine_of().read([[passage]], version=None)
    assert_read(reading, passage, plain_distribution("qwen3", passage))
    assert num_rows([passage]) == 10  # nothing behind what predicts the last of them


def test_a_distribution_can_be_restricted_to_kept_ids():
    tokens = np.asarray(random_tokens(6, seed=3), np.int32)
    allowed = [int(tokens[4]), 5, 9]
    kept = Kept(ids=np.array(allowed, np.int32), offsets=np.array([0, 3, 3], np.int64))
    passage = ScoreRequest(tokens=tokens, positions=np.array([4, 5], np.int32), kept=kept)
    free = passage_of(tokens, judged_from=4)
    [[restricted], [plain]] = engine_of().read([[passage], [free]], version=None)
    expected = plain_distribution("qwen3", passage)
    within = expected[0, int(tokens[4])] - expected[0, list(set(allowed))].logsumexp(0)
    np.testing.assert_allclose(restricted.logprobs[0], within, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(restricted.logprobs[1], plain.logprobs[1], rtol=0, atol=TOLERANCE)


def test_what_passages_of_a_group_begin_with_is_read_once():
    prompt = random_tokens(30, seed=0)
    group = [passage_of([*prompt, i, i + 1], judged_from=30) for i in range(4)]
    laid = lay_out([group])
    assert laid.parents.tolist() == [-1, 0, 0, 0, 0]
    assert num_rows(group) == len(laid.tokens) == 30 + 4  # no row predicts what comes after the end
    twice = lay_out([[group[0]], [group[0]]])
    assert len(twice.tokens) == 2 * 31  # of two groups nothing is shared


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_on_a_gpu_it_says_what_the_cpu_says(dtype, tolerance):
    prompt = random_tokens(7, seed=0)
    group = [
        passage_of(prompt + random_tokens(length, seed=length), judged_from=7, top_k=3)
        for length in (3, 1, 12)
    ]
    model = tiny_model("qwen3").to("cuda", dtype)
    model.set_attn_implementation(PACKED_ATTENTION)
    [readings] = ScoringEngine(model).read([group], version=1)
    [expected] = engine_of().read([group], version=1)
    for reading, cpu in zip(readings, expected, strict=True):
        np.testing.assert_allclose(reading.logprobs, cpu.logprobs, rtol=0, atol=tolerance)
        np.testing.assert_allclose(reading.top_logprobs, cpu.top_logprobs, rtol=0, atol=tolerance)
