"""FP8 on the CPU: weights, activations and KV, against plain transformers with rounded numbers.

The references round with code of their own. An activation that lies between two FP8 values may be
rounded to either, because sums are computed in other orders; hence the tolerances.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import MIXTURE, tiny_model
from engine_rig import (
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    save_model,
    split_work,
    weights,
)
from fp8_reference import fp8_model, logits_with_rounded_kv, rounded
from torch import nn

from millrace.config import EngineConfig, LoraConfig
from millrace.core.errors import ConfigError
from millrace.core.records import ScoreRequest
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.decode.attention import plain_decode
from millrace.inference.embedded.decode.fp8_layers import Fp8Linear, quantize_layers
from millrace.inference.embedded.fp8 import FP8, quantize_rows
from millrace.inference.embedded.kv.cache import KVShape, block_bytes, from_entries, to_entries
from millrace.models.lora.factors import adapter_of

LORA = LoraConfig(rank=4, alpha=8.0)
TOLERANCE = 2e-3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_quantised_numbers_keep_the_promised_precision():
    x = random(64, 512) * torch.logspace(-12, 12, 64)[:, None] * torch.logspace(-9, 0, 512)
    values, scales = quantize_rows(x)
    largest = x.abs().amax(-1, keepdim=True)
    error = (values.float() * scales - x).abs()
    bound = torch.where(x.abs() >= largest / 28672, x.abs() / 16, largest / 458752)
    assert (error <= bound * 1.0001).all()
    assert (values.float().abs().amax(-1) == 448).all()
    torch.testing.assert_close(values.float() * scales, rounded(x), rtol=1e-6, atol=0)


def test_rows_without_numbers_stay_visible_and_zeros_stay_zeros():
    x = random(4, 32)
    x[0] = 0
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    values, scales = quantize_rows(x)
    found = values.float() * scales
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
    assert found[3].isfinite().all()


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_engine_computes_with_fp8_weights_and_activations(architecture: str, decode_steps: int):
    engine = make_engine(architecture, in_fp8=True, decode_steps=decode_steps, prefill_tokens=7)
    requests = [make_request(str(i), prompt=prompt_of(5 + 4 * i, seed=i), seed=i) for i in range(4)]
    done = finish_all(engine, requests)
    rough, plain = fp8_model(architecture), tiny_model(architecture)
    difference = 0.0
    for request in requests:
        completion = done[request.id][0]
        logits = plain_logits(rough, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=TOLERANCE)
        unrounded = plain_logits(plain, request.prompt, completion)
        difference += float((logits - unrounded).abs().max())
    assert difference > 10 * TOLERANCE  # or the test would not see whether anything is rounded


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_swap_quantises_the_new_weights(decode_steps: int):
    engine = make_engine(in_fp8=True, decode_steps=decode_steps, seed=0)
    assert engine.parameter_shapes() == {n: tuple(w.shape) for n, w in weights(seed=1).items()}
    finish_all(engine, [make_request("before")])
    engine.swap(weights(seed=1), version=1)
    request = make_request("after")
    (completion,) = finish_all(engine, [request])["after"]
    other = make_engine(in_fp8=True, decode_steps=decode_steps, seed=1)
    assert_same(completion, finish_all(other, [request])["after"][0])
    logits = plain_logits(fp8_model(seed=1), request.prompt, completion)
    assert_sampled_from(logits, completion, request.sampling, tolerance=TOLERANCE)


def test_commit_copies_half_of_the_bytes_of_the_layers_and_prepare_changes_nothing_live():
    engine = make_engine(in_fp8=True, dtype=torch.bfloat16)
    live = engine._weights
    before = [tensor.clone() for tensor in [*live._parameters.values(), *live._row_scales.values()]]
    prepared = engine.prepare(weights(seed=1), version=1)
    after = [*live._parameters.values(), *live._row_scales.values()]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(before, after, strict=True))
    pairs = [(own, new) for own, new in prepared.pairs if own.dtype == torch.int64]
    in_layers = sum(p.numel() for n, p in live._parameters.items() if n.endswith("_proj.weight"))
    assert sum(new.nbytes for _, new in pairs) == in_layers


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_merged_adapter_is_quantised_with_its_weight(decode_steps: int):
    engine = make_engine(in_fp8=True, lora=LORA, decode_steps=decode_steps)
    shapes = engine.parameter_shapes()
    tensors = {name: 0.3 * random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    engine.swap(tensors, version=1)
    request = make_request()
    (completion,) = finish_all(engine, [request])["r"]
    model = tiny_model("qwen3")
    adapter = adapter_of(model, LORA)
    updates = {
        layer: adapter.merged(layer, weight := model.get_parameter(f"{layer}.weight"), tensors)
        - weight
        for layer in adapter.layers
    }
    logits = plain_logits(fp8_model(adapter=updates), request.prompt, completion)
    assert_sampled_from(logits, completion, request.sampling, tolerance=TOLERANCE)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_unmerged_adapter_is_computed_beside_fp8_products(decode_steps: int):
    lora = LORA.model_copy(update={"apply": "unmerged"})
    engine = make_engine(in_fp8=True, lora=lora, decode_steps=decode_steps)
    shapes = engine.parameter_shapes()
    tensors = {name: 0.3 * random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    engine.swap(tensors, version=1)
    request = make_request()
    (completion,) = finish_all(engine, [request])["r"]
    model = fp8_model()
    adapter = adapter_of(model, lora)
    for layer in adapter.layers:
        zeros = torch.zeros(adapter.layers[layer])
        update = adapter.merged(layer, zeros, tensors)
        module: Any = model.get_submodule(layer)
        hook = functools.partial(_add_update, update)
        # Before the hook that rounds the input, and after the product.
        module.register_forward_pre_hook(_keep_input, prepend=True)
        module.register_forward_hook(hook)
    logits = plain_logits(model, request.prompt, completion)
    assert_sampled_from(logits, completion, request.sampling, tolerance=TOLERANCE)


def _keep_input(module: Any, given: tuple[torch.Tensor]) -> None:
    module.unrounded = given[0]


def _add_update(update: Any, module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output + F.linear(module.unrounded, update)


def test_unmerged_dora_adapter_on_fp8_weights_is_refused():
    dora = LORA.model_copy(update={"apply": "unmerged", "dora": True})
    with pytest.raises(ConfigError, match="DoRA adapter that is not merged needs 16-bit weights"):
        make_engine(in_fp8=True, lora=dora)


def test_experts_and_layers_without_fitting_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"does not support the experts of Qwen3MoeForCausalLM"):
        quantize_layers(tiny_model(MIXTURE))
    model = tiny_model("qwen3")
    model.base_model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"leave engine\.options\.quantization out"):
        quantize_layers(model)


def test_head_embeddings_norms_and_recurrent_layers_stay_as_they_are():
    model = tiny_model("lfm2")
    before = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    quantize_layers(model)
    replaced = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert replaced == {n for n in before if n != "lm_head" and ".conv." not in n}
    assert any(".conv." in name for name in before)
    others = {p.dtype for name, p in model.named_parameters() if name[:-7] not in replaced}
    assert others == {torch.float32}


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_engine_attends_to_fp8_kv(architecture: str, decode_steps: int):
    kv = {"kv_dtype": FP8, "decode_steps": decode_steps}
    engine = make_engine(architecture, prefill_tokens=7, **kv)
    requests = [make_request(str(i), prompt=prompt_of(5 + 4 * i, seed=i), seed=i) for i in range(4)]
    done = finish_all(engine, requests)
    model, plain = tiny_model(architecture), tiny_model(architecture)
    difference = 0.0
    for request in requests:
        completion = done[request.id][0]
        logits = logits_with_rounded_kv(request.prompt, completion, model)
        assert_sampled_from(logits, completion, request.sampling, tolerance=TOLERANCE)
        unrounded = plain_logits(plain, request.prompt, completion)
        difference += float((logits - unrounded).abs().max())
    assert difference > 10 * TOLERANCE


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_reused_preempted_and_chunked_fp8_kv_gives_the_same_logprobs(decode_steps: int):
    kv = {"kv_dtype": FP8, "decode_steps": decode_steps, "eos_ids": ()}
    requests = [make_request(str(i), prompt=prompt_of(9, seed=i % 3), seed=i) for i in range(6)]
    engine = make_engine(num_blocks=16, **kv)
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0
    undisturbed = make_engine(prefill_tokens=64, prefix_cache=False, **kv)
    for request in requests:
        (expected,) = finish_all(undisturbed, [request])[request.id]
        np.testing.assert_array_equal(done[request.id][0].tokens, expected.tokens)
        np.testing.assert_allclose(done[request.id][0].logprobs, expected.logprobs, atol=TOLERANCE)


def test_kept_fp8_kv_is_reused_after_a_swap():
    engine = make_engine(kv_dtype=FP8, kv="keep", eos_ids=())
    engine.add_request(make_request(max_new_tokens=8))
    for _ in range(4):
        engine.step()
    engine.swap(weights(seed=1), version=1)
    prefilled = engine.stats().prefill_tokens
    (completion,) = finish_all(engine)["r"]
    assert set(completion.versions) == {0, 1}
    assert engine.stats().prefill_tokens == prefilled
    assert np.isfinite(completion.logprobs).all()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (8, 8), (24, 9), (192, 128)])
def test_entries_of_fp8_kv_hold_keys_and_values(key_dim: int, value_dim: int):
    shape = KVShape(num_heads=3, key_dim=key_dim, value_dim=value_dim)
    keys, values = random(5, 3, key_dim), 1e-3 * random(5, 3, value_dim, seed=1)
    cache = torch.zeros(5, 3, shape.width(FP8), dtype=torch.uint8)
    assert cache.shape[2] % 16 == 0
    cache.copy_(to_entries(keys, values, cache))
    dims = {"key_dim": key_dim, "value_dim": value_dim}
    found = from_entries(cache, **dims, dtype=torch.float32)
    for given, back in zip((keys, values), found, strict=True):
        torch.testing.assert_close(back, rounded(given), rtol=1e-6, atol=0)


def test_fp8_block_takes_little_more_than_half_of_a_16_bit_one():
    shapes = dict.fromkeys(range(36), KVShape(num_heads=8, key_dim=128, value_dim=128))
    sizes = [block_bytes(shapes, block_tokens=16, dtype=d) for d in (FP8, torch.bfloat16)]
    assert sizes[0] == 16 * 36 * 8 * (256 + 16)
    assert sizes[0] / sizes[1] == pytest.approx(0.53, abs=0.01)


def test_decode_attention_of_an_fp8_cache_equals_that_of_its_numbers():
    lengths = torch.tensor([0, 1, 5, 16, 19])
    tables = torch.arange(5 * 5).view(5, 5).int()
    query, key, value = random(5, 4, 16), random(5, 2, 16, seed=1), random(5, 2, 16, seed=2)
    old = random(100, 2, 32, seed=3)
    cache = torch.zeros(100, 2, 48, dtype=torch.uint8)
    cache.copy_(to_entries(old[..., :16], old[..., 16:], cache))
    *work, num_splits = split_work(5, 1)
    settings = (tables, lengths, *work, 4, num_splits, 0.25, 0, 0.0, None)
    output = plain_decode(query, key, value, cache, *settings)
    plain = torch.cat([rounded(old[..., :16]), rounded(old[..., 16:])], -1)
    expected = plain_decode(query, rounded(key), rounded(value), plain, *settings)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    # The newest tokens are stored.
    numbers = torch.cat(from_entries(cache, key_dim=16, value_dim=16, dtype=torch.float32), -1)
    torch.testing.assert_close(numbers, plain, rtol=1e-6, atol=0)


def test_options_build_an_engine_in_fp8_with_twice_the_blocks(tmp_path):
    save_model(tmp_path)
    config = EngineConfig(max_sequences=64, max_context=128)
    spec = EngineSpec(config=config, model_path=str(tmp_path), version=3, device="cpu")
    small = build_engine(spec, options=EmbeddedBackend(kv_bytes=100_000))
    in_fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    options = EmbeddedBackend(kv_bytes=100_000, **in_fp8)
    engine = build_engine(spec, options=options)
    # float32 entries of 16 numbers, and FP8 entries of 16 bytes and 16 for the scales.
    assert engine.stats().free_blocks == 2 * (small.stats().free_blocks or 0)
    (completion,) = finish_all(engine, [make_request()])["r"]
    # The engine scores with the same FP8 layers, and without the KV cache.
    tokens = np.concatenate([make_request().prompt, completion.tokens])
    at = np.arange(6, len(tokens), dtype=np.int32)
    (scored,) = engine.score([ScoreRequest(tokens=tokens, positions=at)])
    logits = plain_logits(fp8_model(), make_request().prompt, completion).log_softmax(-1)
    chosen = logits.gather(-1, torch.from_numpy(completion.tokens).long()[:, None])[:, 0].numpy()
    np.testing.assert_allclose(scored.logprobs, chosen, atol=TOLERANCE)
