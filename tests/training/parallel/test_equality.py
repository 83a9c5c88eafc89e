"""A trainer of several ranks computes what one rank computes; `millrace bench ranks` has it all."""

import re

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.bench.ranks import FEATURES, MESHES, are_rounding, compare, exceeded, markdown
from millrace.core.microbatch import MeshSizes

FAST = (
    *("grpo", "critic", "lora", "minibatches", "one group", "route replay", "lora of experts"),
    *("baseline", "bfloat16", "bfloat16 mixture", "bfloat16 lora", "router loss"),
)


def too_large(features, meshes) -> dict[tuple[str, str], float]:
    """Differences from one rank that are too large, by feature and mesh."""
    features, meshes = {f: FEATURES[f] for f in features}, {m: MESHES[m] for m in meshes}
    return exceeded(compare(features, meshes))


def test_two_ranks_compute_what_one_rank_computes():
    assert not too_large(FAST, ["fsdp 2"])


def test_ranks_that_share_microbatches_compute_what_one_rank_computes():
    assert not too_large(["teacher's top k", "lora of experts"], ["cp 2"])


def test_ranks_that_share_products_and_experts_compute_what_one_rank_computes():
    # Sums over tp are rounded in another order, which shows in DoRA's magnitudes.
    assert are_rounding(too_large(["critic", "dora", "lora of experts"], ["tp 2", "ep 2"]))
    assert compare({"dora": FEATURES["dora"]}, {"ep 2": MESHES["ep 2"]}) == {"dora": {}}  # no fit


def test_large_differences_that_float64_cannot_explain_are_not_rounding():
    assert are_rounding({})
    assert not are_rounding({("mixture", "tp 2"): 1e-5})
    assert not are_rounding({("bfloat16", "fsdp 2"): 1e-5})


def test_16_bit_compute_may_differ_more_only_if_one_rank_alone_differs_when_it_repeats_its_work():
    assert not exceeded({"bfloat16": {"one rank": 1e-8, "fsdp 2": 1e-3}})
    for table in (
        {"bfloat16": {"one rank": 0.0, "fsdp 2": 1e-3}},
        {"bfloat16": {"fsdp 2": 1e-3}},
        {"grpo": {"one rank": 1e-8, "fsdp 2": 1e-3}},
    ):
        ((feature, _),) = exceeded(table)
        assert feature in table


def test_one_rank_gets_the_same_bits_on_a_cpu_again_and_with_the_code_of_several():
    features = {name: FEATURES[name] for name in FAST}
    equal = {"one rank": 0.0, "fsdp 1": 0.0}  # all gradients, parameters and metrics
    assert compare(features, {mesh: MESHES[mesh] for mesh in equal}) == dict.fromkeys(FAST, equal)


def test_table_has_empty_cells_where_a_mesh_does_not_fit():
    table = {"dora": {"fsdp 1": 0.0}, "grpo": {"tp 2": 1.26e-7, "fsdp 1": float("nan")}}
    assert markdown(table, ["fsdp 1", "tp 2"]).splitlines() == [
        "|  | fsdp 1 | tp 2 |",
        "|---|---|---|",
        "| dora | 0 |  |",
        "| grpo | nan | 1.3e-07 |",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_difference_of_ranks_that_share_products_vanishes_in_float64(capsys):
    assert are_rounding({("grpo", "tp 2"): 1.3e-6})
    assert re.fullmatch(
        r"grpo, tp 2: 1\.3e-06 in float32, \d\.\de-1[4-6] in float64\n", capsys.readouterr().out
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_feature_on_combined_meshes_and_some_on_others():
    meshes = ["fsdp 4", "hsdp 2x2", "cp 2", "tp 2 fsdp 2", "tp 2 ep 2"]
    cells = {**too_large(FEATURES, ["cp 2 fsdp 2"]), **too_large(FAST, meshes)}
    # Sums over cp and tp are rounded in another order, which shows in small gradients.
    assert are_rounding(cells)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_feature_on_every_other_mesh():
    dense = ["cp 4", "cp 2 hsdp 2", "cp 2 tp 2", "tp 4", "tp 2 hsdp 2"]
    assert are_rounding(too_large(["critic"], dense))
    of_experts = ["cp 2 ep 2", "cp 2 ep 2 fsdp 2", "ep 2 fsdp 4", "ep 2 hsdp 2x2"]
    assert not too_large(["lora of experts"], of_experts)


@pytest.mark.slow
def test_ranks_that_share_experts_balance_them_by_the_tokens_of_all_ranks(tmp_path):
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=bench.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=bench.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=bench.NUM_EXPERTS,
        num_experts_per_tok=bench.TOP_K,
        first_k_dense_replace=0,
    )
    Glm4MoeForCausalLM(config).save_pretrained(tmp_path / bench._model_name(is_mixture=True))
    settings = {"trainer": {"router_bias_rate": 0.25}}
    features = {"biases": bench.Feature(settings=settings, is_mixture=True, has_routes=True)}
    alone, shared = (
        run_ranks(bench._run, features, tmp_path, 2, "cpu", sizes=sizes)["biases"]
        for sizes in (MeshSizes(), MeshSizes(dp_shard=2, tp=2, ep=2))
    )
    biases = [value for name, value in alone.items() if "e_score_correction_bias" in name]
    assert len(biases) == bench.LAYERS
    assert all(value.any() for value in biases)
    assert bench._difference(shared, alone) < 2e-6
