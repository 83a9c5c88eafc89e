"""FP8 on CUDA against the CPU."""

import numpy as np
import pytest
import torch
from engine_rig import (
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    split_work,
    weights,
)
from fp8_reference import fp8_model

from millrace.inference.embedded.decode.attention import plain_decode
from millrace.inference.embedded.decode.fp8_layers import plain_product
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.fp8 import FP8, quantize_rows
from millrace.inference.embedded.kv.cache import KVShape, from_entries, to_entries

pytestmark = pytest.mark.gpu

BOTH = {"in_fp8": True, "kv_dtype": FP8, "device": "cuda", "dtype": torch.bfloat16}
LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 400, 1000]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [1, 8, 24, 64, 256, 300])
@pytest.mark.parametrize(("num_out", "num_in"), [(6144, 4096), (4096, 12288), (48, 32), (16, 4112)])
def test_product_matches_reference(num_out: int, num_in: int, num_rows: int):
    x = quantize_rows(random(num_rows, num_in))
    weight = quantize_rows(
        random(num_out, num_in, seed=1) * torch.logspace(-4, 0, num_out)[:, None]
    )
    expected = plain_product(*x, *weight)
    output = torch.ops.millrace.fp8_product(*(t.cuda() for t in (*x, *weight))).float().cpu()
    # Rows of the weight differ in size, and each of them has its own scale. An output that happens
    # to be near 0 has the error of its neighbours.
    sizes = [(values.float() * scales).norm(dim=1) for values, scales in (x, weight)]
    error = (output - expected).abs() / (sizes[0][:, None] * sizes[1] / num_in**0.5)
    assert error.max() < 0.05
    assert error.square().mean().sqrt() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 4, 64])
@pytest.mark.parametrize(
    ("window", "cap", "has_sinks"), [(0, 0.0, False), (50, 0.0, True), (16, 30.0, True)]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_tokens"),
    [(9, 3, 64, 16), (16, 8, 128, 16), (5, 1, 80, 7), (8, 2, 256, 32), (40, 2, 72, 1)],
)
def test_decode_attention_matches_float64_reference(
    heads: int, kv_heads: int, dim: int, block_tokens: int, window: int, cap: float,
    has_sinks: bool, splits: int, dtype: torch.dtype,
):  # fmt: skip
    lengths = torch.tensor(LENGTHS)
    width = -(-max(LENGTHS) // block_tokens)
    num_slots = len(LENGTHS) * width * block_tokens
    tables = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width).int()
    rows = len(LENGTHS)
    query = random(rows, heads, dim).to(dtype)
    key, value = (random(rows, kv_heads, dim, seed=s).to(dtype) for s in (1, 2))
    shape = KVShape(num_heads=kv_heads, key_dim=dim, value_dim=dim)
    empty = torch.zeros(num_slots, kv_heads, shape.width(FP8), dtype=torch.uint8)
    # Values of a token differ from those of the next one by orders of magnitude.
    sizes = torch.logspace(-6, 1, num_slots)[torch.randperm(num_slots), None, None]
    keys, values = (random(num_slots, kv_heads, dim, seed=s) for s in (3, 4))
    cache = to_entries(keys, values * sizes, empty)
    on_gpu = cache.cuda()
    sinks = random(heads, seed=5) if has_sinks else None
    exact = (query.double(), key.double(), value.double())
    *work, num_splits = split_work(rows, splits)
    settings = (block_tokens, num_splits, dim**-0.5, window, cap)
    expected = plain_decode(*exact, cache, tables, lengths, *work, *settings, sinks)
    places = (x.cuda() for x in (query, key, value, on_gpu, tables, lengths, *work))
    output = torch.ops.millrace.paged_decode(
        *places, *settings, None if sinks is None else sinks.cuda()
    )
    output = output.double().cpu()
    error = (output - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    assert output.isfinite().all()
    # A number between two FP8 values may be rounded to either, which only new tokens are.
    assert error.quantile(0.9) < (1e-3 if dtype == torch.float32 else 1e-2)
    assert error.max() < 0.05
    dims = {"key_dim": dim, "value_dim": dim, "dtype": torch.float32}
    for stored, own in zip(
        from_entries(on_gpu.cpu(), **dims), from_entries(cache, **dims), strict=True
    ):
        torch.testing.assert_close(stored, own, rtol=0.13, atol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_decode_loop_in_fp8_samples_from_the_distribution_of_the_cpu(architecture: str):
    engine = make_engine(architecture, decode_steps=4, fast_layers=True, eos_ids=(), **BOTH)
    engine.warm_up()
    requests = [make_request(str(i), prompt=prompt_of(5 + 9 * i, seed=i), seed=i) for i in range(4)]
    done = finish_all(engine, requests)
    model, errors = fp8_model(architecture), []
    for request in requests:
        completion = done[request.id][0]
        logits = plain_logits(model, request.prompt, completion).log_softmax(-1)
        expected = logits.gather(-1, torch.from_numpy(completion.tokens).long()[:, None])[:, 0]
        errors.append(np.abs(expected.numpy() - completion.logprobs).mean())
    assert np.mean(errors) < 0.15  # the model's KV is not rounded


def test_swap_on_gpu_equals_an_engine_with_those_weights():
    settings = {"decode_steps": 4, "fast_layers": True, "eos_ids": (), **BOTH}
    engine = make_engine(seed=0, **settings)
    engine.warm_up()
    finish_all(engine, [make_request("before")])
    new = {name: tensor.to("cuda", torch.bfloat16) for name, tensor in weights(seed=1).items()}
    torch.cuda.synchronize()  # as a receiver does before it hands over a version
    engine.swap(new, version=1)
    request = make_request("after")
    (completion,) = finish_all(engine, [request])["after"]
    other = make_engine(seed=1, **settings)
    other.warm_up()
    (expected,) = finish_all(other, [request])["after"]
    np.testing.assert_array_equal(completion.tokens, expected.tokens)
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=0.02)


def test_reused_and_chunked_kv_gives_about_the_same_logprobs():
    settings = {"decode_steps": 4, "eos_ids": (), **BOTH}
    whole = make_engine(prefix_cache=False, **settings)
    chunked = make_engine(prefill_tokens=8, **settings)
    request = make_request(prompt=40, temperature=0.0, max_new_tokens=1)
    (expected,) = finish_all(whole, [request])["r"]
    for _ in range(2):
        (completion,) = finish_all(chunked, [request])["r"]
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=0.1)
    assert chunked.stats().cached_tokens > 0


def test_sleep_keeps_fp8_weights_scales_and_kv():
    memory = EngineMemory(torch.device("cuda"))
    settings = {"decode_steps": 4, "eos_ids": (), **BOTH}
    engine = make_engine(memory=memory, **settings)
    engine.add_request(make_request(max_new_tokens=24))
    engine.step(should_stop=lambda: True)
    engine.sleep()
    engine.wake()
    (completion,) = finish_all(engine)["r"]
    (expected,) = finish_all(make_engine(**settings), [make_request(max_new_tokens=24)])["r"]
    np.testing.assert_array_equal(completion.tokens, expected.tokens)
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=0.02)
