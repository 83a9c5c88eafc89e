"""The costs of GPUs: near what one H200 measured (docs/performance.md), and what splits change."""

from dataclasses import replace

import pytest
from planned_models import QWEN_2B, QWEN_8B, QWEN_30B, planned

from millrace.config import load_config
from millrace.core.microbatch import MeshSizes
from millrace.plan.memory import fitting
from millrace.plan.model_costs import GPUS, STEP_S, DeviceCosts, ModelShape
from millrace.plan.planned_run import Split

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
PROMPT_TOKENS, NEW_TOKENS = 64, 512  # of the table "Generation"


def h200(model, **values) -> DeviceCosts:
    return DeviceCosts(shape=ModelShape.of_config(model), gpu=GPUS["h200"], **values)


def decode_s(model, sequences) -> float:
    return h200(model).decode_s(sequences, sequences * (PROMPT_TOKENS + NEW_TOKENS / 2))


def test_a_mixture_reads_few_experts_for_one_token_and_all_for_many():
    shape = ModelShape.of_config(QWEN_30B)
    assert shape.read_weights(1) / 1e9 == pytest.approx(3.04, rel=0.01)
    assert shape.read_weights(1000) == pytest.approx(shape.num_weights, rel=0.02)


@pytest.mark.parametrize(
    ("model", "sequences", "measured"),
    [(SMOLLM2, 64, 68_538), (QWEN_2B, 64, 28_653), (QWEN_8B, 64, 11_229), (QWEN_8B, 256, 22_691)],
)
def test_decode_is_near_what_an_h200_measured(model, sequences, measured):
    assert sequences / decode_s(model, sequences) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("model", "sequences", "measured"),
    [
        (SMOLLM2, 256, 143_266),
        (QWEN_2B, 256, 49_464),
        (QWEN_30B, 64, 3_610),
        (QWEN_30B, 256, 11_831),
    ],
)
def test_no_rate_is_above_that_of_an_earlier_version_if_only_that_was_measured(
    model, sequences, measured
):
    seconds = NEW_TOKENS * decode_s(model, sequences)
    seconds += sequences * h200(model).prefill_s(PROMPT_TOKENS)
    assert 0.9 * measured <= sequences * NEW_TOKENS / seconds <= measured


def test_prefill_is_near_what_an_h200_measured():
    assert 64 / h200(QWEN_8B).prefill_s(64) == pytest.approx(39_636, rel=0.03)


def test_long_prompts_are_near_what_an_h200_measured():
    """8 prompts of 30,720 tokens and 1,024 new tokens of each, with the prefill."""
    costs, context = h200(QWEN_2B), 8 * (30_720 + 512)
    seconds = 8 * costs.prefill_s(30_720) + 1024 * costs.decode_s(8, context)
    assert 8 * 1024 / seconds == pytest.approx(605, rel=0.05)


ADAPTER_8B = sum(ModelShape.of_config(QWEN_8B).adapter_weights(32))
ADAPTER_30B = sum(ModelShape.of_config(QWEN_30B).adapter_weights(32))


@pytest.mark.parametrize(
    ("model", "length", "tokens", "options", "measured"),
    [
        (QWEN_2B, 2048, 16_384, {}, 42_546),
        (QWEN_2B, 32_768, 32_768, {}, 16_328),
        (QWEN_8B, 2048, 16_384, {"adapter_weights": ADAPTER_8B}, 14_728),
        (QWEN_8B, 2048, 16_384, {"adapter_weights": ADAPTER_8B, "recomputes": True}, 10_507),
        (QWEN_8B, 2048, 16_384, {"recomputes": True}, 9_035),
        (QWEN_30B, 2048, 8_192, {"adapter_weights": ADAPTER_30B, "recomputes": True}, 9_310),
    ],
)
def test_training_is_near_what_an_h200_measured(model, length, tokens, options, measured):
    seconds = h200(model, **options).train_s(tokens, tokens / length * length**2 / 2)
    assert 0.8 * measured <= tokens / seconds <= 1.03 * measured


def test_epochs_and_minibatches_are_part_of_a_step():
    def costs(**trainer) -> DeviceCosts:
        run = planned(QWEN_2B, 2, "h100", trainer={"groups_per_step": 4, **trainer})
        (sizes, *_) = fitting(run)
        return run.costs(Split(**sizes, groups_per_step=4, max_staleness=1))

    once_s = costs().train_s(1e5, 1e8)
    assert costs(epochs=3).train_s(1e5, 1e8) - STEP_S == pytest.approx(3 * (once_s - STEP_S))
    optimizer_s = 32 * ModelShape.of_config(QWEN_2B).num_weights / (3350 * 1e9)
    assert costs(minibatches=4).train_s(1e5, 1e8) == pytest.approx(once_s + 3 * optimizer_s)


def test_sums_over_tensor_parallel_ranks_take_time():
    shape = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    dense_70b = ModelShape.of_config({**QWEN_8B, **shape, "intermediate_size": 28672})
    gpu = GPUS["h100"]
    step_s = [
        DeviceCosts(shape=dense_70b, gpu=gpu, ranks=8, mesh=MeshSizes(tp=tp)).train_s(2**17, 2**28)
        for tp in (1, 2, 8)
    ]
    moved = [2**17 * tp / 8 * 8192 * 2 * 2 * (1 - 1 / tp) for tp in (2, 8)]
    summed_s = [4 * 80 * num_bytes / (gpu.link * 1e9) for num_bytes in moved]
    assert step_s[1:] == pytest.approx([step_s[0] + seconds for seconds in summed_s])


def test_copies_of_the_model_move_weights_within_hosts_and_gradients_between_them():
    """So few tokens that FSDP takes longer than computing, on 4 hosts."""
    sharded = DeviceCosts(shape=ModelShape.of_config(QWEN_8B), gpu=GPUS["h100"], ranks=32)
    copied = replace(sharded, mesh=MeshSizes(dp_replicate=4, dp_shard=8))
    weights, gpu = sharded.shape.num_weights, sharded.gpu
    link, network, memory = (1e9 * rate for rate in (gpu.link, gpu.network, gpu.gb_per_s))
    sharded_s = 8 * weights * 31 / 32 / network + 32 * weights / 32 / memory
    copied_s = 8 * weights * 7 / 8 / link + 2 * 4 * weights / 8 * 3 / 4 / network
    copied_s += 32 * weights / 8 / memory
    assert sharded.train_s(2**14, 2**24) == pytest.approx(STEP_S + sharded_s)
    assert copied.train_s(2**14, 2**24) == pytest.approx(STEP_S + copied_s)
    assert copied_s < sharded_s / 3


def test_copies_of_the_model_are_searched_where_ranks_have_several_hosts():
    run = planned(QWEN_8B, 32, "h100")
    splits = [Split(**sizes, groups_per_step=4, max_staleness=1) for sizes in fitting(run)]
    copies = {(split.ranks, split.trainer_dp_replicate) for split in splits}
    assert {pair for pair in copies if pair[0] > 8} == {(16, 1), (16, 2), (24, 1), (24, 3)}
    assert all(count == 1 for ranks, count in copies if ranks <= 8)
    sharded, copied = (split for split in splits if split.ranks == 16)
    assert run.rates(copied)[1] > 2 * run.rates(sharded)[1]
    assert copied.trainer_bytes > sharded.trainer_bytes
    config = load_config({"model": "m", **run.settings(copied)})
    assert config.trainer.mesh_sizes == MeshSizes(dp_replicate=2, dp_shard=8)
