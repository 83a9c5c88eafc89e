from importlib.metadata import version

import pytest
from transformers import (
    FalconMambaConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.microbatch import MeshSizes
from millrace.run.mesh_checks import (
    check_has_plans,
    check_mesh,
    check_model_mesh,
    rank_warnings,
)


def dense(**settings) -> Qwen3Config:
    return Qwen3Config(
        num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=4, **settings
    )


DENSE = dense()
DYNAMIC = dense(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
MIXTURE = Qwen3MoeConfig(
    num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, num_experts=6
)
SHARED_EXPERTS = Glm4MoeConfig(
    num_hidden_layers=1, first_k_dense_replace=0, moe_intermediate_size=17
)
MLA = Glm4MoeLiteConfig(num_hidden_layers=1)
UNKNOWN_STYLE = dense()
UNKNOWN_STYLE.base_model_tp_plan = {"layers.*.mlp.gate_proj": "packed_colwise"}
WITHOUT_ATTENTION = (MambaConfig(), Mamba2Config(), FalconMambaConfig())


def config_of(*, ranks=1, mesh=None, devices: str | list[str] = "auto", **sections):
    return load_config(
        {
            "model": "m",
            "trainer": {"ranks": ranks, "mesh": mesh or {}},
            "placement": {"trainer": devices},
            **sections,
        }
    )


def refusal_of(check, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ranks_that_the_mesh_does_not_name_shard_the_model():
    assert config_of().trainer.mesh_sizes == MeshSizes()
    config = config_of(ranks=8, mesh={"dp_replicate": 2, "tp": 2})
    assert config.trainer.mesh_sizes == MeshSizes(dp_replicate=2, dp_shard=2, tp=2)
    assert config.trainer.mesh_sizes.num_data_ranks == 4


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        (8, {"dp_shard": 4}, "dp_replicate 1 * dp_shard 4 * cp 1 * tp 1 = 4 ranks, but"),
        (3, {"dp_replicate": 2}, "= 2 ranks, but trainer.ranks = 3; make them equal."),
        (1, {"tp": 2}, "= 2 ranks, but trainer.ranks = 1; make them equal."),
        (6, {"ep": 4}, "trainer.mesh.ep = 4 does not divide dp_shard * cp = 6; choose a divisor."),
    ],
)
def test_impossible_mesh_is_refused(ranks, mesh, message):
    assert message in refusal_of(check_mesh, config_of(ranks=ranks, mesh=mesh))


@pytest.mark.parametrize(
    ("ranks", "devices", "message"),
    [
        (1, ["cuda:0", "cuda:1"], "names 2 devices for trainer.ranks = 1; name one for each rank"),
        (4, ["cuda:0", "cuda:1"], "names 2 devices for trainer.ranks = 4"),
        (2, "cuda:0", "names 1 device for trainer.ranks = 2"),
        (2, ["cuda:0", "cpu"], "mixes 'cpu' with other devices"),
    ],
)
def test_devices_that_do_not_fit_the_ranks_are_refused(ranks, devices, message):
    assert message in refusal_of(check_mesh, config_of(ranks=ranks, devices=devices))


def test_devices_are_named_for_the_ranks_of_this_host_only():
    def joined(devices):
        table = {"trainer": {"ranks": 4, "remote": 2}, "placement": {"trainer": devices}}
        return load_config({"model": "m", **table})

    check_mesh(joined(["cuda:0", "cuda:1"]))
    message = refusal_of(check_mesh, joined([f"cuda:{i}" for i in range(4)]))
    assert "trainer.ranks = 4, of which trainer.remote = 2 choose theirs on other hosts" in message


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        (MeshSizes(tp=8), DENSE, "has 12 attention heads, which trainer.mesh.tp * cp = 8 ranks"),
        (MeshSizes(tp=2, cp=3), DENSE, "has 4 key-value heads, which trainer.mesh.tp * cp = 6"),
        (MeshSizes(cp=2), DYNAMIC, "of type 'dynamic', which depend on all positions of a pass"),
        (
            MeshSizes(cp=2),
            Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2),
            "has layers with a recurrent state, which computes a sequence token by token",
        ),
        (
            MeshSizes(cp=2),
            PreTrainedConfig(num_attention_heads=4, layers_block_type=["mamba", "attention"]),
            "has layers with a recurrent state, which computes a sequence token by token",
        ),
        *(
            (MeshSizes(**{dimension: 2}), model, "has no attention heads, which trainer.mesh.tp *")
            for model in WITHOUT_ATTENTION
            for dimension in ("tp", "cp")
        ),
        (MeshSizes(dp_shard=2, ep=2), DENSE, "ep = 2 shares experts, and model 'm' has none"),
        (MeshSizes(dp_shard=4, ep=4), MIXTURE, "has 6 experts, which trainer.mesh.ep = 4 ranks"),
        (
            MeshSizes(tp=2),
            dense(vocab_size=99),
            "'model.embed_tokens' in Qwen3ForCausalLM has the shape [99, ",
        ),
        (
            MeshSizes(tp=2),
            dense(intermediate_size=65),
            "tp = 2 ranks cannot share evenly; choose a",
        ),
        (MeshSizes(tp=2), SHARED_EXPERTS, "'model.layers.0.mlp.shared_experts.gate_proj' in Glm4"),
        (MeshSizes(tp=2), UNKNOWN_STYLE, "for Qwen3ForCausalLM uses 'packed_colwise', which is"),
        (MeshSizes(tp=2), GPT2Config(), "no plan of tensor parallelism for 'gpt2', the"),
        (MeshSizes(tp=2), Llama4TextConfig(), "no plan of expert parallelism for 'llama4_text'"),
    ],
)
def test_mesh_that_cannot_share_the_model_is_refused(sizes, model, message):
    assert message in refusal_of(check_model_mesh, sizes, model, path="m")


def test_mesh_that_shares_the_model_evenly_is_accepted():
    check_model_mesh(MeshSizes(tp=2, cp=2), DENSE, path="m")
    check_model_mesh(MeshSizes(dp_shard=3, ep=3), MIXTURE, path="m")
    check_model_mesh(MeshSizes(dp_shard=2, tp=4, ep=2), MIXTURE, path="m")
    check_model_mesh(MeshSizes(tp=2), MLA, path="m")
    for model in WITHOUT_ATTENTION:
        check_model_mesh(MeshSizes(), model, path="m")
        check_model_mesh(MeshSizes(dp_replicate=2, dp_shard=2), model, path="m")


def test_transformers_without_plans_is_refused_with_the_version_that_has_them():
    check_has_plans()
    message = refusal_of(check_has_plans, module="transformers.distributed.of_no_version")
    assert message.startswith("trainer.mesh.tp and ep need transformers 5.22, and ")
    assert version("transformers") in message


def test_several_ranks_warn_about_versions_that_were_not_tried():
    (warning,) = rank_warnings(config_of(ranks=2), tried={"torch": "2.0", "transformers": "5.22"})
    assert "was tested with torch 2.0 and transformers 5.22, and here are torch" in warning
    assert rank_warnings(config_of(), tried={"torch": "2.0"}) == []
    tried = {name: ".".join(version(name).split(".")[:2]) for name in ("torch", "transformers")}
    assert rank_warnings(config_of(ranks=2), tried=tried) == []
