"""ScoringEngine against a plain forward pass of transformers."""

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model

from millrace.core.records import Kept, ScoreRequest, TokenLogprobs
from millrace.inference.embedded.scoring import ScoringEngine, num_rows, pack
from millrace.models.attention.packed import PACKED_ATTENTION

TOLERANCE = 1e-5


def make_score_request(
    tokens: list[int] | np.ndarray, *, scored_from: int, **settings
) -> ScoreRequest:
    tokens = np.asarray(tokens, np.int32)
    positions = np.arange(scored_from, len(tokens), dtype=np.int32)
    return ScoreRequest(tokens=tokens, positions=positions, **settings)


def random_tokens(length: int, *, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def plain_distribution(architecture: str, request: ScoreRequest) -> torch.Tensor:
    """[n, V] logprobs at the request's temperature, by transformers alone."""
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(request.tokens).long()[None]).logits[0]
    return (logits[request.positions - 1] / request.temperature).log_softmax(-1)


def assert_scored(scored: TokenLogprobs, request: ScoreRequest, expected: torch.Tensor) -> None:
    targets = torch.from_numpy(request.tokens[request.positions]).long()
    chosen = expected.gather(1, targets[:, None]).squeeze(1)
    np.testing.assert_allclose(scored.logprobs, chosen, rtol=0, atol=TOLERANCE)
    top = expected.topk(request.top_k, dim=-1)
    np.testing.assert_array_equal(scored.top_ids, top.indices)
    np.testing.assert_allclose(scored.top_logprobs, top.values, rtol=0, atol=TOLERANCE)


def engine_of(architecture: str = "qwen3", **settings) -> ScoringEngine:
    model = tiny_model(architecture)
    model.set_attn_implementation(PACKED_ATTENTION)
    return ScoringEngine(model, **settings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_match_plain_forward_of_transformers(architecture):
    prompt = random_tokens(7, seed=0)
    shared = [
        make_score_request(prompt + random_tokens(length, seed=length), scored_from=7, top_k=5)
        for length in (3, 1, 12)
    ]
    alone = make_score_request(random_tokens(20, seed=9), scored_from=4, top_k=2, temperature=0.7)
    engine = engine_of(architecture, logprob_chunk=6)
    groups = [[alone], shared, [shared[0]]]
    for group, results in zip(groups, engine.score(groups, version=3), strict=True):
        for request, scored in zip(group, results, strict=True):
            assert_scored(scored, request, plain_distribution(architecture, request))
            assert scored.version == 3


def test_positions_can_be_in_the_middle_of_the_tokens():
    tokens = np.asarray(random_tokens(15, seed=2), np.int32)
    request = ScoreRequest(tokens=tokens, positions=np.array([3, 4, 10], np.int32), top_k=3)
    [[scored]] = engine_of().score([[request]], version=None)
    assert_scored(scored, request, plain_distribution("qwen3", request))
    assert num_rows([request]) == 10  # no row follows the predictor of the last position


def test_kept_ids_restrict_distribution():
    tokens = np.asarray(random_tokens(6, seed=3), np.int32)
    allowed = [int(tokens[4]), 5, 9]
    kept = Kept(ids=np.array(allowed, np.int32), offsets=np.array([0, 3, 3], np.int64))
    request = ScoreRequest(tokens=tokens, positions=np.array([4, 5], np.int32), kept=kept)
    free = make_score_request(tokens, scored_from=4)
    [[restricted], [plain]] = engine_of().score([[request], [free]], version=None)
    expected = plain_distribution("qwen3", request)
    within = expected[0, int(tokens[4])] - expected[0, list(set(allowed))].logsumexp(0)
    np.testing.assert_allclose(restricted.logprobs[0], within, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(restricted.logprobs[1], plain.logprobs[1], rtol=0, atol=TOLERANCE)


def test_shared_prefix_is_computed_once_per_group():
    prompt = random_tokens(30, seed=0)
    group = [make_score_request([*prompt, i, i + 1], scored_from=30) for i in range(4)]
    segments, _ = pack([group])
    assert segments.parents == [-1, 0, 0, 0, 0]
    # The last token of each request predicts nothing.
    assert num_rows(group) == sum(map(len, segments.tokens)) == 30 + 4
    twice, _ = pack([[group[0]], [group[0]]])
    assert sum(map(len, twice.tokens)) == 2 * 31  # groups share nothing


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_scores_on_gpu_match_cpu(dtype, tolerance):
    prompt = random_tokens(7, seed=0)
    group = [
        make_score_request(prompt + random_tokens(length, seed=length), scored_from=7, top_k=3)
        for length in (3, 1, 12)
    ]
    model = tiny_model("qwen3").to("cuda", dtype)
    model.set_attn_implementation(PACKED_ATTENTION)
    [results] = ScoringEngine(model).score([group], version=1)
    [expected] = engine_of().score([group], version=1)
    for scored, cpu in zip(results, expected, strict=True):
        np.testing.assert_allclose(scored.logprobs, cpu.logprobs, rtol=0, atol=tolerance)
        np.testing.assert_allclose(scored.top_logprobs, cpu.top_logprobs, rtol=0, atol=tolerance)
