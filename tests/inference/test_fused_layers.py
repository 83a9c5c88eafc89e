"""Decoder layers without the code of transformers: on a CPU against plain transformers, and the
kernels on CUDA against their plain functions."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import MIXTURE, WIDE_MIXTURE
from engine_rig import (
    assert_sampled_from,
    finish_all,
    letter_tokenizer,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    tiny_model,
    weights,
)
from fp8_reference import fp8_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from millrace.inference.embedded.decode.fused_layers import (
    FusedModel,
    can_fuse,
)
from millrace.inference.embedded.decode.fused_linear import fuse_projections
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION, measure_cache
from millrace.inference.embedded.parts import EngineSizes

FUSED = ("llama", "mistral", "qwen2", "qwen3", MIXTURE)


def is_fused(engine: EmbeddedEngine) -> bool:
    forward = engine._model.base_model.forward
    return isinstance(getattr(forward, "__self__", None), FusedModel)


def requests():
    sizes = enumerate((3, 8, 20))
    return [make_request(str(i), prompt=prompt_of(n, seed=i), n=2, seed=i) for i, n in sizes]


def assert_samples_from(engine: EmbeddedEngine, model: Any, *, tolerance: float) -> None:
    done = finish_all(engine, requests())
    for request in requests():
        for completion in done[request.id]:
            logits = plain_logits(model, request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=tolerance)


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_sample_from_plain_transformers(architecture: str):
    engine = make_engine(architecture, eos_ids=(), decode_steps=5, fast_layers=True)
    assert is_fused(engine)
    assert_samples_from(engine, tiny_model(architecture), tolerance=1e-4)


@pytest.mark.parametrize("architecture", ["gemma2", "qwen2_moe", "gpt_oss"])
def test_other_layers_keep_their_code(architecture: str):
    engine = make_engine(architecture, eos_ids=(), decode_steps=5, fast_layers=True)
    assert not is_fused(engine)


class _Halved(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) / 2


def test_llama_with_code_of_its_own_keeps_it():
    model: Any = tiny_model("llama")
    model.set_attn_implementation(PAGED_ATTENTION)
    rules = measure_cache(model).rules
    assert can_fuse_projected(model, rules)
    model.model.layers[1].mlp = _Halved(model.model.layers[1].mlp)
    assert not can_fuse_projected(model, rules)


def test_a_patched_method_is_not_replaced():
    model: Any = tiny_model("qwen3")
    model.set_attn_implementation(PAGED_ATTENTION)
    norm = model.model.layers[0].self_attn.q_norm
    norm.forward = lambda x: x
    assert not can_fuse_projected(model, measure_cache(model).rules)


def can_fuse_projected(model: Any, rules: Any) -> bool:
    fuse_projections(model)
    return can_fuse(model, rules)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotary_embeddings_with_scaling_are_those_of_transformers(scaling: dict[str, Any]):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        initializer_range=0.2, rope_parameters={"rope_theta": 10000.0, **scaling},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(PAGED_ATTENTION)
    engine = EmbeddedEngine(
        copy.deepcopy(model), letter_tokenizer(), version=0, eos_ids=(),
        sizes=EngineSizes(
            max_context=64, max_sequences=8, num_blocks=64, block_tokens=4, prefill_tokens=64,
            decode_steps=5, fast_layers=True,
        ),
    )  # fmt: skip
    assert is_fused(engine)
    (completion,) = finish_all(engine, [make_request(prompt=prompt_of(30))])["r"]
    model.set_attn_implementation("eager")
    logits = plain_logits(model, prompt_of(30), completion)
    assert_sampled_from(logits, completion, make_request().sampling, tolerance=1e-4)


def test_swaps_reach_fused_layers():
    engine = make_engine("llama", eos_ids=(), decode_steps=5, fast_layers=True)
    finish_all(engine, requests())
    engine.swap(weights("llama", seed=7), version=1)
    assert_samples_from(engine, tiny_model("llama", seed=7), tolerance=1e-4)


def test_fused_layers_in_fp8_sample_from_the_model_of_fp8_weights():
    engine = make_engine("qwen3", eos_ids=(), decode_steps=5, fast_layers=True, in_fp8=True)
    assert is_fused(engine)
    assert_samples_from(engine, fp8_model(), tolerance=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 40, 100, 160])
def test_fused_layers_on_cuda_in_batches_of_all_sizes(num_sequences: int):
    """Products of the kernel, in parts and of cuBLAS, and rows with several splits."""
    engine = make_engine(
        "qwen3", eos_ids=(), decode_steps=8, fast_layers=True, device="cuda", dtype=torch.float16,
        max_sequences=160, max_context=256, num_blocks=12_000, prefill_tokens=4096,
    )  # fmt: skip
    asked = [
        make_request(str(i), prompt=prompt_of(200 - i, seed=i), seed=i, max_new_tokens=20)
        for i in range(num_sequences)
    ]
    done, model = finish_all(engine, asked), tiny_model("qwen3")
    for request in asked[:: max(1, num_sequences // 8)]:
        (completion,) = done[request.id]
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [(name, torch.float32, 1e-3) for name in FUSED if name != MIXTURE]
    + [(name, torch.bfloat16, 0.2) for name in FUSED if name != MIXTURE]
    # In bfloat16, some tokens go to other experts; in float32, experts have no kernels.
    + [(WIDE_MIXTURE, torch.float16, 0.05)],
)
def test_fused_layers_on_cuda_sample_from_plain_transformers(
    architecture: str, dtype: torch.dtype, tolerance: float
):
    engine = make_engine(
        architecture, eos_ids=(), decode_steps=5, fast_layers=True, device="cuda", dtype=dtype
    )
    assert is_fused(engine)
    assert_samples_from(engine, tiny_model(architecture), tolerance=tolerance)
