"""Rotary embeddings of Phi-3.5-MoE, against those of transformers."""

import pytest
import torch
from operations import Operations
from transformers import PhimoeConfig, PhimoeForCausalLM

from millrace.models.architectures.phimoe import StaticPhimoeRotaryEmbedding, use_own_classes
from millrace.models.directory import max_positions

LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 64,
}


def model_with(rope: dict) -> PhimoeForCausalLM:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    config = PhimoeConfig(
        **sizes,
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=256,
        sliding_window=None,
        rope_parameters={"rope_theta": 10_000.0, **rope},
        pad_token_id=0,
    )
    return PhimoeForCausalLM(config)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LONG_ROPE], ids=["default", "longrope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embeddings_equal_those_of_transformers_and_never_wait(rope, dtype):
    model = model_with(rope)
    rotary, hidden = model.model.rotary_emb, torch.empty(0, dtype=dtype)
    limit = max_positions(model.config)
    assert limit is not None
    positions = torch.arange(limit)[None]
    expected = rotary(hidden, positions)
    use_own_classes(model)
    assert isinstance(rotary, StaticPhimoeRotaryEmbedding)
    with Operations() as operations:
        found = rotary(hidden, positions)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    # `item` of a tensor waits for the device; others make tensors on the host.
    assert not {"_local_scalar_dense", "arange", "max"} & set(operations.names)
