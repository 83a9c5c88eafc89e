"""Every kernel of decode steps compiles for the GPUs that it is meant for. Needs Triton, no GPU:
`make test-kernels`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from millrace.inference.embedded.decode.attention import Rotation
from millrace.inference.embedded.decode.kernels import (
    attention_kernels,
    expert_kernels,
    fused_kernels,
    rotary_kernels,
    sampling_kernels,
)
from millrace.inference.embedded.decode.tilings import tiling_of
from millrace.inference.embedded.fp8 import FP8, quantize_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}  # of a program


# Ampere's tensor cores have no FP8.
IN_DTYPES = [(sm, torch.bfloat16) for sm in SHARED_BYTES] + [(sm, FP8) for sm in (89, 90, 120)]


class Layer(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    has_norm: bool = False


LAYERS = {
    "SmolLM2-135M": Layer(9, 3, 64, 576, 1536),
    "Qwen3-1.7B": Layer(16, 8, 128, 2048, 6144, has_norm=True),
    "Qwen3-8B": Layer(32, 8, 128, 4096, 12288, has_norm=True),
}


@pytest.mark.parametrize(("capability", "dtype"), IN_DTYPES)
@pytest.mark.parametrize("num_rows", [8, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compile(
    capability: int, dtype: torch.dtype, name: str, num_rows: int, compile_for: Callable[..., Any]
):
    compiled, layer = compile_for(capability), LAYERS[name]
    width = (layer.heads + 2 * layer.kv_heads) * layer.dim
    residual = torch.zeros(num_rows, layer.hidden)
    norm = torch.ones(layer.hidden, dtype=torch.bfloat16)
    parts = torch.zeros(4, num_rows, layer.hidden)
    rows = fused_kernels.add_norm(residual, parts, norm, eps=1e-6, dtype=dtype)
    compute(rows, num_out=width, dtype=dtype, capability=capability)
    rotation = rotation_of(layer)
    attend(torch.zeros(num_rows, width).bfloat16(), layer, rotation, is_fp8=dtype == FP8)
    attended = torch.zeros(num_rows, layer.heads * layer.dim, dtype=torch.bfloat16)
    rows = fused_kernels.quantize(attended) if dtype == FP8 else (attended, None)
    compute(rows, num_out=layer.hidden, dtype=dtype, capability=capability, max_parts=8)
    rows = fused_kernels.add_norm(residual, None, norm, eps=1e-6, dtype=dtype)
    compute(rows, num_out=layer.inner, dtype=dtype, capability=capability, is_gated=True)
    fused_kernels.gate(torch.zeros(num_rows, 2 * layer.inner).bfloat16(), dtype=dtype)
    rotary_kernels.rotate(
        torch.zeros(num_rows, width).bfloat16(), torch.zeros(num_rows).long(), rotation,
        num_heads=(layer.heads, layer.kv_heads),
    )  # fmt: skip
    assert len(compiled) >= 8
    assert compiled.shared_bytes <= SHARED_BYTES[capability]
    overlaps = ["griddepcontrol" in kernel.asm["ptx"] for kernel in compiled]
    assert all(overlaps) if capability >= 90 else not any(overlaps)


def compute(
    rows: Any,
    *,
    num_out: int,
    dtype: torch.dtype,
    capability: int,
    is_gated: bool = False,
    max_parts: int = 1,
) -> None:
    num_rows, num_in = rows[0].shape
    tiling = tiling_of(
        (num_rows, num_out, num_in), itemsize=dtype.itemsize, is_gated=is_gated,
        max_parts=max_parts, shared_bytes=SHARED_BYTES[capability],
    )  # fmt: skip
    assert tiling is not None
    weight = torch.zeros(num_out * (2 if is_gated else 1), num_in)
    matrix = quantize_rows(weight) if dtype == FP8 else (weight.to(dtype), None)
    out = torch.float32 if max_parts > 1 else torch.bfloat16
    fused_kernels.product(rows, matrix, is_gated=is_gated, dtype=out, tiling=tiling)


def rotation_of(layer: Layer) -> Rotation:
    gain = torch.ones(layer.dim, dtype=torch.bfloat16)
    norms = (gain, gain) if layer.has_norm else None
    return Rotation(torch.zeros(64, 2, layer.dim // 2), norms, 1e-6)


def attend(
    joint: torch.Tensor, layer: Layer, rotation: Rotation | None, *, is_fp8: bool, **scores: Any
) -> None:
    num_rows, block = len(joint), 16
    numbers = 2 * layer.dim + (16 if is_fp8 else 0)
    cache = torch.zeros(block, layer.kv_heads, numbers).to(torch.uint8 if is_fp8 else joint.dtype)
    heads = joint.view(num_rows, -1, layer.dim)
    places = torch.zeros(num_rows, 4, dtype=torch.int32)
    attention_kernels.paged_decode(
        *heads.split([layer.heads, layer.kv_heads, layer.kv_heads], dim=1),
        cache, places, torch.ones(num_rows).long(), places,
        torch.zeros(num_rows, layer.kv_heads, dtype=torch.int32), block, num_rows,
        layer.dim**-0.5, scores.get("window", 0), scores.get("cap", 0.0), scores.get("sinks"),
        scores.get("chunk", 0), rotation,
    )  # fmt: skip


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize(("capability", "dtype"), IN_DTYPES)
def test_attention_of_other_models_compiles(
    capability: int, dtype: torch.dtype, dim: int, compile_for: Callable[..., Any]
):
    compiled = compile_for(capability)
    layer = Layer(8, 2, dim, 512, 512)
    joint = torch.zeros(4, 12 * dim, dtype=torch.float16)
    rules = {"window": 100, "cap": 30.0, "sinks": torch.zeros(8), "chunk": 256}
    attend(joint, layer, None, is_fp8=dtype == FP8, **rules)
    assert compiled.shared_bytes <= SHARED_BYTES[capability]


@pytest.mark.parametrize("num_rows", [8, 256])
@pytest.mark.parametrize("capability", [90])
def test_experts_compile(capability: int, num_rows: int, compile_for: Callable[..., Any]):
    """Those of Qwen3-30B-A3B; the decode loop computes experts on Hopper and newer only."""
    compiled = compile_for(capability)
    hidden = torch.zeros(num_rows, 2048)
    parts = fused_kernels.router_scores(hidden, torch.zeros(128, 2048))
    chosen, weights = expert_kernels.route(parts, top_k=8, normalizes=True)
    matrices = (torch.zeros(2, n, m, dtype=torch.bfloat16) for n, m in ((1536, 2048), (2048, 768)))
    expert_kernels.expert_outputs(hidden, chosen, weights, *matrices)
    slots = torch.zeros(num_rows, dtype=torch.int64)
    expert_kernels.record_routes(chosen, torch.zeros(16, 8, dtype=torch.uint8), slots)
    assert len(compiled) == 6
    assert compiled.shared_bytes <= SHARED_BYTES[capability]


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_sampling_compiles(capability: int, truncates: bool, compile_for: Callable[..., Any]):
    compiled = compile_for(capability)
    row = torch.ones(4)
    truncation = (torch.zeros(4).long(), row, row) if truncates else None
    sampling_kernels.sample(
        torch.zeros(4, 151_936), temperatures=row, keys=torch.zeros(4).long(),
        indices=torch.zeros(4).long(), truncation=truncation, capacity=4096,
    )  # fmt: skip
    assert len(compiled) >= (8 if truncates else 2)
    assert compiled.shared_bytes <= SHARED_BYTES[capability]
