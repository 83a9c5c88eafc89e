"""Scoring requests served by an engine between two decode steps."""

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from engine_rig import (
    Collected,
    assert_same,
    distribution,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
)

from millrace.config import LoraConfig
from millrace.core.records import Completion, Request, ScoreRequest
from millrace.inference.embedded.engine import EmbeddedEngine

SETTINGS = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.5}]


def score_request(request: Request, completion: Completion) -> ScoreRequest:
    """Scores every sampled token under its own sampling settings."""
    tokens = np.concatenate([request.prompt, completion.tokens])
    return ScoreRequest(
        tokens=tokens,
        positions=np.arange(len(request.prompt), len(tokens), dtype=np.int32),
        temperature=request.sampling.temperature,
        kept=completion.kept,
        wants_entropies=True,
    )


def sampled(engine: EmbeddedEngine) -> list[tuple[Request, Completion]]:
    requests = [
        make_request(str(i), prompt=prompt_of(5 + 3 * i, seed=i), seed=i, **settings)
        for i, settings in enumerate(SETTINGS)
    ]
    done = finish_all(engine, requests)
    return [(request, done[request.id][0]) for request in requests]


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_match_sampled_logprobs_and_entropies(architecture, decode_steps):
    engine = make_engine(architecture, decode_steps=decode_steps)
    known = sampled(engine)
    results = engine.score([score_request(*each) for each in known])
    model = tiny_model(architecture)
    for (request, completion), found in zip(known, results, strict=True):
        np.testing.assert_allclose(found.logprobs, completion.logprobs, rtol=0, atol=1e-5)
        expected = distribution(plain_logits(model, request.prompt, completion), request.sampling)
        entropies = torch.special.entr(expected.exp()).sum(-1)
        np.testing.assert_allclose(found.entropies, entropies, rtol=0, atol=1e-4)
        assert found.version == 0


@pytest.mark.parametrize("apply", ["merged", "unmerged"])
def test_scoring_applies_policy_adapter(apply):
    engine = make_engine(lora=LoraConfig(rank=4, alpha=8.0, apply=apply))
    generator = torch.Generator().manual_seed(1)
    adapter = {
        name: 0.3 * torch.randn(shape, generator=generator)
        for name, shape in engine.parameter_shapes().items()
    }
    (before,) = engine.score([score_request(*sampled(engine)[0])])
    engine.swap(adapter, version=1)
    known = sampled(engine)
    results = engine.score([score_request(*each) for each in known])
    for (_, completion), found in zip(known, results, strict=True):
        np.testing.assert_allclose(found.logprobs, completion.logprobs, rtol=0, atol=1e-5)
    assert abs(results[0].entropies - before.entropies).max() > 0.01
    assert results[0].version == 1


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_scoring_does_not_change_running_sequences(decode_steps):
    request = make_request("long", max_new_tokens=40, n=3)
    alone = finish_all(make_engine(decode_steps=decode_steps), [request])["long"]
    engine = make_engine(decode_steps=decode_steps)
    request_to_score = ScoreRequest(
        tokens=prompt_of(30), positions=np.arange(1, 30, dtype=np.int32)
    )
    engine.add_request(request)
    collected = Collected()
    while engine.has_work:
        collected.add(engine.step())
        engine.score([request_to_score])
    for own, expected in zip(collected.by_request()["long"], alone, strict=True):
        assert_same(own, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_on_gpu_match_sampled_logprobs(dtype):
    engine = make_engine(device="cuda", dtype=dtype, decode_steps=4, fast_layers=True)
    known = sampled(engine)
    results = engine.score([score_request(*each) for each in known])
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for (_, completion), found in zip(known, results, strict=True):
        np.testing.assert_allclose(found.logprobs, completion.logprobs, rtol=0, atol=tolerance)
        assert (found.entropies >= 0).all()
