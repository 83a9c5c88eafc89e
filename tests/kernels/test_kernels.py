"""The kernels of decoder layers against plain functions. On a GPU, or interpreted on a CPU, where
Triton's interpreter multiplies no bfloat16 and rounds FP8 otherwise: `make test-kernels`."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_rig import split_work

from millrace.inference.embedded.decode.attention import Rotation, plain_decode
from millrace.inference.embedded.decode.fused_layers import (
    plain_add_norm,
    plain_gate,
    plain_rotate,
)
from millrace.inference.embedded.decode.tilings import Tiling, tiling_of
from millrace.inference.embedded.fp8 import FP8, quantize_rows

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETS or torch.cuda.is_available():
    from millrace.inference.embedded.decode.kernels import (
        attention_kernels,
        expert_kernels,
        fused_kernels,
        rotary_kernels,
    )

DEVICE = "cpu" if INTERPRETS else "cuda"
# The interpreter is slow, so it gets the small ones of the cases.
HALVES = [torch.float16] if INTERPRETS else [torch.float16, torch.bfloat16, FP8]
DTYPES = [torch.float32, *HALVES]
NUM_ROWS = [1, 40] if INTERPRETS else [1, 16, 40, 64, 100]
PRODUCTS = [(96, 192)] if INTERPRETS else [(960, 576), (4096, 1536), (80, 6144)]
pytestmark = [] if INTERPRETS else pytest.mark.gpu
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, FP8: 0.08}
on_gpu = pytest.mark.gpu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_device(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(DEVICE, copy=True) for tensor in tensors]


def assert_close(rows, expected, *, dtype: torch.dtype) -> None:
    """Rows, with scales in FP8."""
    values, wanted = (
        (x.float() if scales is None else x.float() * scales.float()).cpu()
        for x, scales in (rows, expected)
    )
    error = (values - wanted).abs().max() / wanted.abs().max()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [0, 1, 8])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (33, 576), (300, 5120)])
def test_norm_kernel_matches_plain_function(
    num_rows: int, size: int, num_parts: int, dtype: torch.dtype
):
    residual, weight = random(num_rows, size), random(size, seed=1).bfloat16()
    parts = random(num_parts, num_rows, size, seed=2) if num_parts else None
    tensors = on_device(residual, parts, weight)
    expected = plain_add_norm(residual, parts, weight, eps=1e-6, dtype=dtype)
    rows = fused_kernels.add_norm(*tensors, eps=1e-6, dtype=dtype)
    assert_close(rows, expected, dtype=dtype)
    torch.testing.assert_close(tensors[0].cpu(), residual, rtol=1e-5, atol=1e-5)


def test_norm_kernel_adds_parts_that_lie_row_by_row():
    residual, parts, weight = random(5, 96), random(5, 8, 96, seed=1), random(96, seed=2)
    tensors = on_device(residual, parts, weight)
    tensors[1] = tensors[1].transpose(0, 1)
    expected = plain_add_norm(
        residual, parts.transpose(0, 1), weight, eps=1e-6, dtype=torch.float32
    )
    rows = fused_kernels.add_norm(*tensors, eps=1e-6, dtype=torch.float32)
    assert_close(rows, expected, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (33, 1536), (300, 12288)])
def test_gate_kernel_matches_plain_function(num_rows: int, size: int, dtype: torch.dtype):
    both = random(num_rows, 2 * size).to(torch.bfloat16 if dtype == FP8 else dtype)
    rows = fused_kernels.gate(both.to(DEVICE), dtype=dtype)
    assert_close(rows, plain_gate(both, dtype=dtype), dtype=dtype)


ROTATIONS = [(4, 4, 64, False), (9, 3, 64, True), (16, 8, 128, True), (5, 1, 80, False)]


def rotation_of(dim: int, *, has_norm: bool) -> Rotation:
    angles = random(1200, dim // 2, seed=3)
    norms = (random(dim, seed=4), random(dim, seed=5)) if has_norm else None
    return Rotation(torch.stack([angles.cos(), angles.sin()], dim=1), norms, 1e-6)


def moved(rotation: Rotation) -> Rotation:
    norms: Any = None if rotation.norms is None else tuple(on_device(*rotation.norms))
    return rotation._replace(angles=rotation.angles.to(DEVICE), norms=norms)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != FP8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "has_norm"), ROTATIONS)
def test_rotary_kernel_matches_plain_function(
    heads: int, kv_heads: int, dim: int, has_norm: bool, dtype: torch.dtype
):
    joint = random(7, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.tensor([0, 1, 5, 63, 64, 1000, 1199])
    rotation, on_device = rotation_of(dim, has_norm=has_norm), joint.to(DEVICE, copy=True)
    sizes = {"num_heads": (heads, kv_heads)}
    rotary_kernels.rotate(on_device, positions.to(DEVICE), moved(rotation), **sizes)
    plain_rotate(joint, positions, rotation, **sizes)
    assert_close((on_device, None), (joint, None), dtype=dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != FP8])
@pytest.mark.parametrize(("splits", "chunk"), [(1, 0), (4, 0), (1, 64), (4, 300)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "has_norm"), ROTATIONS)
def test_decode_attention_rotates_queries_and_keys(
    heads: int, kv_heads: int, dim: int, has_norm: bool, splits: int, chunk: int, dtype: torch.dtype
):
    """With chunks of the context, and without."""
    lengths = torch.tensor([0, 1, 17, 64, 65, 400, 1000])
    num_rows, block = len(lengths), 16
    tables = torch.randperm(num_rows * 63).view(num_rows, 63).int()
    joint = random(num_rows, (heads + 2 * kv_heads) * dim).to(dtype)
    cache = random(num_rows * 63 * block, kv_heads, 2 * dim, seed=1).to(dtype)
    rotation, written = rotation_of(dim, has_norm=has_norm), cache.to(DEVICE, copy=True)
    *work, num_splits = split_work(num_rows, splits)
    sizes = [heads, kv_heads, kv_heads]
    settings = (block, num_splits, dim**-0.5, 0, 0.0, None, chunk)
    parts: Any = joint.to(DEVICE, copy=True).view(num_rows, -1, dim).split(sizes, dim=1)
    places = on_device(tables, lengths, *work)
    decode: Any = attention_kernels.paged_decode
    output = decode(*parts, written, *places, *settings, rotation=moved(rotation))
    plain_rotate(joint, (lengths - 1).clamp_min(0), rotation, num_heads=(heads, kv_heads))
    parts = joint.view(num_rows, -1, dim).split(sizes, dim=1)
    plain: Any = plain_decode
    expected = plain(*parts, cache, tables, lengths, *work, *settings)
    assert_close((output, None), (expected, None), dtype=dtype)
    assert_close((written, None), (cache, None), dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["plain", "biased", "gated", "in parts"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("num_out", "num_in"), PRODUCTS)
def test_product_kernel_matches_reference(
    num_out: int, num_in: int, num_rows: int, kind: str, dtype: torch.dtype
):
    x, weight = random(num_rows, num_in), random(num_out, num_in, seed=1) / num_in**0.5
    bias = random(num_out, seed=2).bfloat16() if kind == "biased" else None
    if dtype == FP8:
        rows, matrix = quantize_rows(x), quantize_rows(weight)
    else:
        rows, matrix = (x.to(dtype), None), (weight.to(dtype), None)
    exact: Any = [
        values.double() * (1.0 if s is None else s.double()) for values, s in (rows, matrix)
    ]
    expected = F.linear(*exact)
    if bias is not None:
        expected += bias.double()
    if kind == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    num_parts = 3 if kind == "in parts" else 1
    tiling = Tiling(32, 64, num_parts)
    options = {"bias": None if bias is None else bias.to(DEVICE), "is_gated": kind == "gated"}
    on_device = [tuple(on_device(*part)) for part in (rows, matrix)]
    product: Any = fused_kernels.product
    output = product(*on_device, dtype=torch.float32, tiling=tiling, **options)
    assert len(output) == num_parts
    error = (output.sum(0).cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < (5e-3 if dtype == FP8 else 1e-4)


SHAPES = {
    "SmolLM2-135M": [(960, 576, 1, False), (576, 576, 8, False), (1536, 576, 1, True)],
    "Qwen3-1.7B": [(4096, 2048, 1, False), (6144, 2048, 1, True), (2048, 6144, 8, False)],
    "Qwen3-8B": [(6144, 4096, 1, False), (12288, 4096, 1, True), (4096, 12288, 8, False)],
}


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("model", SHAPES)
def test_chosen_tilings_compute_the_product(model: str, num_rows: int):
    device = torch.cuda.get_device_properties(0)
    for num_out, num_in, max_parts, is_gated in SHAPES[model]:
        tiling = tiling_of(
            (num_rows, num_out, num_in), itemsize=2, is_gated=is_gated, max_parts=max_parts,
            shared_bytes=device.shared_memory_per_block_optin,
        )  # fmt: skip
        x = random(num_rows, num_in).bfloat16()
        weight = (random(num_out * (2 if is_gated else 1), num_in, seed=1) / num_in**0.5).bfloat16()
        expected = x.double() @ weight.double().T
        if is_gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up
        product: Any = fused_kernels.product
        output = product(
            (x.to(DEVICE), None), (weight.to(DEVICE), None), dtype=torch.float32, is_gated=is_gated,
            tiling=tiling,
        )  # fmt: skip
        error = (output.sum(0).cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-4


@pytest.mark.parametrize("num_rows", [1, 64, 300])
@pytest.mark.parametrize(("num_experts", "size"), [(8, 32), (60, 1408), (128, 2048)])
def test_router_scores_have_the_precision_of_float32(num_experts: int, size: int, num_rows: int):
    hidden, weight = random(num_rows, size), random(num_experts, size, seed=1) / size**0.5
    scores = fused_kernels.router_scores(hidden.to(DEVICE), weight.to(DEVICE)).double().sum(0).cpu()
    expected = hidden.double() @ weight.double().T
    # Errors in the units of a product in float32.
    plain = (hidden @ weight.T).double() - expected
    assert (scores - expected).square().mean() < 9 * plain.square().mean() + 1e-16


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)])
def test_routing_kernel_chooses_the_experts_of_torch(
    num_experts: int, top_k: int, normalizes: bool
):
    parts = random(3, 70, num_experts)
    scores = parts.double().sum(0)
    chosen, shares = expert_kernels.route(parts.to(DEVICE), top_k=top_k, normalizes=normalizes)
    values, expected = scores.softmax(-1).topk(top_k)
    if normalizes:
        values = values / values.sum(-1, keepdim=True)
    assert torch.equal(chosen.cpu(), expected)
    torch.testing.assert_close(shares.cpu().double(), values, rtol=1e-5, atol=1e-6)


def test_scores_that_are_nan_choose_experts_that_exist():
    parts = random(2, 5, 60)
    parts[:, 1] = torch.nan
    parts[0, 2, 7] = torch.nan
    chosen, _ = expert_kernels.route(parts.to(DEVICE), top_k=4, normalizes=True)
    assert chosen.min() >= 0
    assert chosen.max() < 60
