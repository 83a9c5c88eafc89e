"""New weights: all or nothing, between two forward passes, while sequences continue."""

import gc

import numpy as np
import psutil
import pytest
import torch
from architectures import tiny_model
from engine_rig import (
    Collected,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    weights,
)
from transformers import DynamicCache, PreTrainedModel

from millrace.core.errors import WeightError
from millrace.core.records import Completion, Request
from millrace.inference.embedded.engine import EmbeddedEngine

ARCHITECTURES = ("qwen3", "gemma3")


def swap_while_generating(
    engine: EmbeddedEngine, requests: list[Request], architecture: str
) -> dict[str, list[Completion]]:
    """Version v = the model of seed v; a new one after every fifth step."""
    for request in requests:
        engine.add_request(request)
    collected = Collected()
    for version in range(1, 4):
        for _ in range(5):
            collected.add(engine.step())
        engine.swap(weights(architecture, seed=version), version=version)
    return finish_all(engine, collected=collected)


def mixed_requests() -> list[Request]:
    settings = [{}, {"temperature": 1.4}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.01}]
    return [
        make_request(str(i), prompt=prompt_of(3 + 6 * i, seed=i), n=2, seed=i, **each)
        for i, each in enumerate(settings)
    ]


def cached_logits(
    models: dict[int, PreTrainedModel], prompt: np.ndarray, completion: Completion
) -> torch.Tensor:
    """[N, V]: token by token with a transformers cache, each pass under the token's version."""
    cache = DynamicCache(config=models[0].config)
    inputs = [prompt, *completion.tokens[:-1, None]]
    rows = []
    for tokens, version in zip(inputs, completion.versions.tolist(), strict=True):
        ids = torch.from_numpy(tokens).long()[None]
        with torch.no_grad():
            rows.append(models[version](input_ids=ids, past_key_values=cache).logits[0, -1].float())
    return torch.stack(rows)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3_next"])
def test_kept_kv_continues_like_a_transformers_cache(architecture: str):
    engine = make_engine(architecture, eos_ids=(), kv="keep")
    requests = mixed_requests()
    done = swap_while_generating(engine, requests, architecture)
    models = {seed: tiny_model(architecture, seed=seed) for seed in range(4)}
    # A recurrent state carries the rounding of all earlier tokens along.
    tolerance = 3e-5 if architecture == "qwen3_next" else 1e-5
    for model in models.values():
        model.set_attn_implementation("eager")
    for request in requests:
        for completion in done[request.id]:
            assert completion.versions.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3]
            logits = cached_logits(models, request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=tolerance)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recomputed_kv_matches_full_forward_of_each_version(architecture: str):
    engine = make_engine(architecture, eos_ids=(), kv="recompute", prefill_tokens=1024)
    requests = mixed_requests()
    done = swap_while_generating(engine, requests, architecture)
    models = [tiny_model(architecture, seed=seed) for seed in range(4)]
    for request in requests:
        for completion in done[request.id]:
            assert completion.versions.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3]
            by_version = torch.stack([plain_logits(m, request.prompt, completion) for m in models])
            own = by_version[torch.from_numpy(completion.versions).long(), torch.arange(16)]
            assert_sampled_from(own, completion, request.sampling)


def test_resumed_completion_keeps_versions_of_its_older_tokens():
    engine = make_engine(eos_ids=())
    engine.add_request(make_request())
    for _ in range(6):
        engine.step()
    ((partial,),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    engine.swap(weights(seed=1), version=1)
    request = make_request("again")
    resumed = Request(id="again", prompt=request.prompt, sampling=request.sampling, partial=partial)
    (completion,) = finish_all(engine, [resumed])["again"]
    assert completion.versions.tolist() == [0] * 6 + [1] * 10
    old, new = (
        plain_logits(tiny_model("qwen3", seed=s), request.prompt, completion) for s in (0, 1)
    )
    assert_sampled_from(torch.cat([old[:6], new[6:]]), completion, request.sampling)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 'model.norm.weight'"),
        (lambda tensors: tensors.update(stray=torch.zeros(1)), "has 'stray'"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}),
            r"as \(31,\); the model's is \(32,\)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_update_that_does_not_fit_is_refused_without_changes(spoil, reason: str):
    tensors = weights(seed=1)
    spoil(tensors)
    engine = make_engine()
    with pytest.raises(WeightError, match=reason):
        engine.swap(tensors, version=1)
    assert engine.version == 0
    untouched = finish_all(make_engine(), [make_request()])["r"][0]
    completion = finish_all(engine, [make_request()])["r"][0]
    np.testing.assert_array_equal(completion.logprobs, untouched.logprobs)
    assert set(completion.versions) == {0}


def test_engine_with_half_applied_swap_serves_nothing_until_next_version():
    engine = make_engine()
    engine.add_request(make_request())
    engine.step()
    prepared = engine.prepare(weights(seed=1), version=1)
    live, new = prepared.pairs[-1]
    prepared.pairs[-1] = live, new.to("meta")  # has no data to copy
    with pytest.raises(WeightError, match="serves nothing until a complete version"):
        engine.commit(prepared)
    assert engine.version is None
    assert not engine.has_work
    assert engine.step() == []
    assert engine.stats().generated_tokens == 1
    engine.swap(weights(seed=2), version=2)
    (completion,) = finish_all(engine)["r"]
    assert completion.versions.tolist() == [0] + [2] * (len(completion.versions) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_500_swaps_leave_memory_flat(kv: str):
    engine = make_engine(kv=kv, eos_ids=())
    versions = [weights(seed=seed) for seed in (0, 1)]
    process = psutil.Process()

    def swaps(count: int) -> None:
        for i in range(count):
            if not engine.has_work:
                engine.add_request(make_request(n=2, max_new_tokens=20))
            engine.step()
            engine.swap(versions[i % 2], version=i)
        finish_all(engine)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    swaps(100)
    before_tensors, before_bytes = tensors(), process.memory_info().rss
    swaps(500)
    assert tensors() <= before_tensors  # those of earlier tests may be freed
    assert process.memory_info().rss - before_bytes < 4 << 20
    assert engine.stats().free_blocks == 256
