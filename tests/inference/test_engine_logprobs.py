"""Logprobs and kept ids against a plain forward pass of transformers."""

import numpy as np
import pytest
from architectures import ARCHITECTURES, tiny_model
from engine_rig import (
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
)

from millrace.core.records import Request

SETTINGS = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
}


def mixed_requests(*, n: int = 1) -> list[Request]:
    """Every setting in one batch, on prompts of various lengths."""
    return [
        make_request(name, prompt=prompt_of(3 + 5 * i, seed=i), n=n, seed=i, **settings)
        for i, (name, settings) in enumerate(SETTINGS.items())
    ]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_oss", "qwen3_next"])
def test_all_sampling_settings_in_one_batch_match_plain_forward(architecture: str):
    requests = mixed_requests()
    done = finish_all(make_engine(architecture, prefill_tokens=9, eos_ids=()), requests)
    model = tiny_model(architecture)
    for request in requests:
        (completion,) = done[request.id]
        assert len(completion.tokens) == 16
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "lfm2"])
@pytest.mark.parametrize("max_sequences", [3, 16])
def test_completions_with_shared_prefill_match_plain_forward(architecture: str, max_sequences: int):
    engine = make_engine(architecture, max_sequences=max_sequences, eos_ids=())
    requests = mixed_requests(n=4)
    done = finish_all(engine, requests)
    model = tiny_model(architecture)
    for request in requests:
        assert len(done[request.id]) == 4
        for completion in done[request.id]:
            logits = plain_logits(model, request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling)
    # Each prompt was prefilled once; a member that came late computed one token of it, or those
    # after the last snapshot if it needs a state.
    num_once = sum(len(request.prompt) for request in requests)
    num_again = engine.stats().prefill_tokens - num_once
    assert (num_again > 0) == (architecture == "lfm2" and max_sequences == 3)
    assert num_again <= sum(3 * ((len(request.prompt) - 1) % 4 + 1) for request in requests)
    assert engine.stats().free_blocks == 256


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_preempted_sequences_match_plain_forward_and_undisturbed_engine(architecture: str):
    requests = mixed_requests(n=2)
    engine = make_engine(architecture, num_blocks=26, prefill_tokens=13, eos_ids=())
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().free_blocks == 26
    undisturbed = finish_all(make_engine(architecture, max_sequences=16, eos_ids=()), requests)
    model = tiny_model(architecture)
    for request in requests:
        pairs = zip(done[request.id], undisturbed[request.id], strict=True)
        for completion, expected in pairs:
            assert_same(completion, expected)
            logits = plain_logits(model, request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_resumed_completion_equals_uninterrupted_one(name: str):
    request = make_request(seed=5, **SETTINGS[name])
    whole = finish_all(make_engine(eos_ids=()), [request])["r"][0]
    engine = make_engine(eos_ids=())
    engine.add_request(request)
    for _ in range(7):
        assert not engine.step()
    (aborted,) = engine.abort(["r"])
    (partial,) = aborted.completions.values()
    assert partial.finish == "abort"
    np.testing.assert_array_equal(partial.tokens, whole.tokens[:7])
    resumed = Request(
        id="again",
        prompt=request.prompt,
        sampling=request.sampling,
        seed=request.seed,
        partial=partial,
    )
    (completion,) = finish_all(make_engine(prefill_tokens=4, eos_ids=()), [resumed])["again"]
    assert_same(completion, whole)
    assert completion.finish == "length"
    logits = plain_logits(tiny_model("qwen3"), request.prompt, completion)
    assert_sampled_from(logits, completion, request.sampling)


def test_bucketed_attention_of_uneven_contexts_matches_plain_forward():
    lengths = [100, 3, 5, 90, 4, 2, 6, 3]
    requests = [
        make_request(str(i), prompt=prompt_of(length, seed=i), max_new_tokens=20)
        for i, length in enumerate(lengths)
    ]
    engine = make_engine(block_tokens=1, num_blocks=2048, eos_ids=())
    done = finish_all(engine, requests)
    model = tiny_model("qwen3")
    for request in requests:
        (completion,) = done[request.id]
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling)
