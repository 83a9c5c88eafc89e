"""What fits into the memory of GPUs, in the bytes that docs/how-to/share-one-gpu.md lists."""

import pytest
from planned_models import QWEN_2B, QWEN_8B, QWEN_30B, planned

from millrace.plan.memory import RUNTIME_BYTES, engine_fit, trainer_bytes, trainer_fit
from millrace.plan.model_costs import ModelShape

SHAPE = ModelShape.of_config(QWEN_8B)
WEIGHTS, LAYERS = SHAPE.num_weights, SHAPE.num_weights - SHAPE.table_weights
ADAPTER = sum(SHAPE.adapter_weights(16))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (2 + 4) * WEIGHTS),  # two staged versions
        ({"weights": {"transport": "disk"}}, (2 + 2) * WEIGHTS),  # staged by the host
        ({"engine": {"type": "vllm"}}, 2 * WEIGHTS),
        ({"lora": {}}, 2 * WEIGHTS + 4 * LAYERS + 4 * ADAPTER),  # merged
        ({"lora": {"apply": "unmerged"}}, 2 * WEIGHTS + 4 * ADAPTER + 4 * ADAPTER),
        ({"lora": {"apply": "unmerged", "dora": True}}, 2 * WEIGHTS + 8 * ADAPTER + 8 * ADAPTER),
    ],
)
def test_an_engine_holds_staged_weights_beside_its_own(settings, expected):
    fit = engine_fit(planned(QWEN_8B, 2, "h200", **settings), 1)
    assert fit is not None
    assert fit["engine_bytes"] - fit["kv_bytes"] - RUNTIME_BYTES == expected


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        ({}, 2 * WEIGHTS // 8 + 2 * WEIGHTS),  # a snapshot of its shards; rank 0 has the version
        ({"weights": {"transport": "shm"}}, 2 * WEIGHTS // 8),
        ({"engine": {"type": "vllm"}}, 2 * WEIGHTS // 8),
    ],
)
def test_a_rank_holds_what_it_publishes(settings, published):
    whole = trainer_bytes(planned(QWEN_8B, 16, "h200", **settings), ranks=8)
    state = 16 * WEIGHTS // 8
    gathered = int(8 * (SHAPE.table_weights + SHAPE.layer_weights(0)))
    activations = 8192 * SHAPE.activation_bytes(checkpointing=True)
    assert whole == state + gathered + activations + published + RUNTIME_BYTES


def test_frozen_weights_have_16_bits_on_a_gpu_whatever_this_host_has():
    settings = {"lora": {}, "placement": {"trainer": "cuda:7", "engines": "cuda:6"}}
    needed = trainer_bytes(planned(QWEN_8B, 2, "h200", **settings), ranks=1)
    state = 2 * LAYERS + 4 * SHAPE.table_weights + 16 * ADAPTER
    activations = 8192 * SHAPE.activation_bytes(checkpointing=True)
    assert needed == state + activations + 2 * 2 * ADAPTER + RUNTIME_BYTES


def test_gpus_beyond_the_key_value_heads_have_copies_of_the_kv():
    run = planned(QWEN_30B, 8, "h100", engine={"type": "vllm"})
    four, eight = engine_fit(run, 4), engine_fit(run, 8)
    assert four is not None
    assert eight is not None
    assert four["max_sequences"] == eight["max_sequences"] == 256
    assert four["kv_bytes"] == eight["kv_bytes"]


def test_copies_of_the_model_divide_its_state_less():
    run = planned(QWEN_2B, 64, "h100", engine={"type": "vllm"})
    sharded, copied = (trainer_fit(run, 32, copies=copies) for copies in (1, 4))
    assert sharded is not None
    assert copied is not None
    assert (copied["trainer_dp_replicate"], copied["trainer_tp"]) == (4, 1)
    more = (16 + 2) * ModelShape.of_config(QWEN_2B).num_weights * (1 / 8 - 1 / 32)
    assert copied["trainer_bytes"] - sharded["trainer_bytes"] == pytest.approx(more, rel=1e-6)


DENSE_70B = {
    **QWEN_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
LARGE_MIXTURE = {
    **QWEN_30B,
    "hidden_size": 7168,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts": 256,
    "moe_intermediate_size": 2048,
}


@pytest.mark.parametrize(
    ("model", "ranks", "gpu", "tokens", "tp", "ep"),
    [
        (QWEN_8B, 16, "h100", 8192, 1, 1),
        (DENSE_70B, 240, "a100-40gb", 15360, 4, 1),
        (LARGE_MIXTURE, 480, "h100", 4096, 1, 4),
    ],
)
def test_ranks_share_products_or_experts_if_nothing_else_fits(model, ranks, gpu, tokens, tp, ep):
    settings = {"trainer": {"microbatch_tokens": tokens}, "engine": {"type": "vllm"}}
    run = planned(model, 2 * ranks, gpu, **settings)
    fit = trainer_fit(run, ranks)
    assert fit is not None
    assert (fit["trainer_cp"], fit["trainer_tp"], fit["trainer_ep"]) == (1, tp, ep)
    assert fit["trainer_bytes"] < run.memory_bytes
