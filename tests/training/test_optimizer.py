import math
import sys

import pytest
import torch
from architectures import MIXTURE, tiny_model

from millrace.config import LoraConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.errors import CheckpointError, ConfigError
from millrace.models.lora.trained import TrainedAdapter
from millrace.training.checkpoints.snapshot import host_copy
from millrace.training.critic import ValueModel
from millrace.training.optimizer import Schedule, TrainSettings, build_optimizer


def rates(steps, **settings):
    schedule = Schedule(learning_rate=2.0, total_steps=12, **settings)
    return [schedule.at(step) for step in steps]


def test_warm_up_rises_linearly_to_the_full_rate():
    assert rates(range(5), warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_constant_stays():
    assert rates([0, 5, 11, 500]) == [2.0] * 4


def test_linear_falls_to_its_floor():
    got = rates([2, 7, 12, 40], kind="linear", warmup_steps=2, min_share=0.1)
    assert got == pytest.approx([2.0, 1.1, 0.2, 0.2])


def test_cosine_falls_to_its_floor():
    got = rates([0, 3, 6, 12, 40], kind="cosine", min_share=0.5)
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert got == pytest.approx([2.0, 1.0 + quarter, 1.5, 1.0, 1.0])


def test_a_warm_up_as_long_as_the_run_has_no_fall():
    assert rates([11, 12], kind="cosine", warmup_steps=12) == pytest.approx([2.0, 2.0])


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(model, TrainSettings(weight_decay=0.1))
    decaying, steady = optimizer.param_groups
    assert [tuple(p.shape) for p in decaying["params"]] == [(3, 4)]
    assert decaying["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in steady["params"]] == [(3,)] * 3
    assert steady["weight_decay"] == 0.0


def test_tied_weights_are_optimised_once():
    model = tiny_model("qwen3")
    optimizer = build_optimizer(model, TrainSettings(weight_decay=0.1))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_an_optimizer_of_the_users_own_gets_its_keys():
    settings = TrainSettings(
        optimizer="torch.optim:SGD", optimizer_options={"momentum": 0.5}, weight_decay=0.1
    )
    made = build_optimizer(torch.nn.Linear(2, 2), settings)
    assert isinstance(made, torch.optim.SGD)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert made.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("torch.optim:SGD", {"momentun": 0.5}, "Section 'optimizer' does not fit"),
        ("builtins:dict", {}, "is not a torch.optim.Optimizer"),
        ("torch.optim:Nope", {}, "has no 'Nope'"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_one_sentence(name, options, message):
    settings = TrainSettings(optimizer=name, optimizer_options=options)
    with pytest.raises(ConfigError, match=message):
        build_optimizer(torch.nn.Linear(2, 2), settings)


def step(model, optimizer, *, learning_rate=1e-3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def names_by_algorithm(model) -> dict[str, set[str]]:
    groups = build_optimizer(model, TrainSettings(optimizer=MUON)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[str]] = {MUON: set(), ADAMW: set()}
    for group in groups:
        found[group["algorithm"]] |= {names.pop(id(parameter)) for parameter in group["params"]}
    assert not any(model.get_parameter(name).requires_grad for name in names.values())
    return found


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    found = names_by_algorithm(tiny_model(MIXTURE))
    assert {name.rpartition("layers.1.")[2] for name in found[MUON] if "layers.1." in name} == {
        *(f"self_attn.{kind}_proj.weight" for kind in "qkvo"),
        "mlp.gate.weight",
    }
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= found[ADAMW]
    assert "model.layers.0.mlp.experts.down_proj" in found[ADAMW]


def test_muon_takes_the_factors_of_an_adapter():
    model = tiny_model("qwen3")
    TrainedAdapter(model, LoraConfig(rank=2), model_path="nowhere")
    found = names_by_algorithm(model)
    assert len(found[MUON]) == 2 * 7 * 2  # A and B of seven layers' matrices in two layers
    assert not found[ADAMW]


def test_muon_leaves_the_head_of_a_critic_to_adamw():
    found = names_by_algorithm(ValueModel(tiny_model("qwen3")))
    assert {"head.weight", "head.bias", "backbone.embed_tokens.weight"} <= found[ADAMW]


def test_muon_and_adamw_make_steps_of_similar_size():
    model, before = tiny_model("qwen3"), tiny_model("qwen3")
    step(model, build_optimizer(model, TrainSettings(optimizer=MUON)), learning_rate=1e-3)
    for (name, weight), old in zip(model.named_parameters(), before.parameters(), strict=True):
        size = (weight - old).square().mean().sqrt().item()
        assert 1e-4 < size <= 1.01e-3, name


def test_a_state_of_muon_resumes():
    straight, resumed = tiny_model("qwen3"), tiny_model("qwen3")
    settings = TrainSettings(optimizer=MUON, weight_decay=0.1)
    first, second = (build_optimizer(m, settings) for m in (straight, resumed))
    step(straight, first, seed=0)
    step(resumed, second, seed=0)
    state = host_copy(second.state_dict())
    third = build_optimizer(resumed, settings)
    third.load_state_dict(state)
    step(straight, first, seed=1)
    step(resumed, third, seed=1)
    for (name, weight), other in zip(
        straight.named_parameters(), resumed.parameters(), strict=True
    ):
        assert torch.equal(weight, other), name


@pytest.mark.parametrize("name", [ADAMW, MUON])
@pytest.mark.parametrize("offload", [False, True])
def test_a_run_may_be_resumed_with_other_settings_of_its_optimizer(name, offload):
    model = tiny_model("qwen3")
    before = build_optimizer(model, TrainSettings(optimizer=name, weight_decay=0.1))
    step(model, before)
    settings = {"weight_decay": 0.3, "betas": (0.8, 0.9), "offload_optimizer": offload}
    fresh, resumed = (
        build_optimizer(model, TrainSettings(optimizer=name, **settings)) for _ in range(2)
    )
    resumed.load_state_dict(host_copy(before.state_dict()))
    for own, wanted in zip(resumed.param_groups, fresh.param_groups, strict=True):
        assert own["weight_decay"] == wanted["weight_decay"]
        assert own.get("betas") == wanted.get("betas")
    assert resumed.state.keys() == before.state.keys()


def test_the_state_of_another_optimizer_is_refused():
    model = torch.nn.Linear(2, 2)
    state = build_optimizer(model, TrainSettings(optimizer="torch.optim:SGD")).state_dict()
    message = "written with optimizer.type = 'torch.optim:SGD', and the run has 'adamw'"
    for offload in (False, True):
        optimizer = build_optimizer(model, TrainSettings(offload_optimizer=offload))
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(state)


def test_the_state_of_a_checkpoint_without_the_type_loads():
    model = torch.nn.Linear(2, 2, bias=False)
    before = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, before)
    after = build_optimizer(model, TrainSettings())
    after.load_state_dict(before.state_dict())
    assert torch.equal(*(o.state[model.weight]["exp_avg"] for o in (before, after)))


def test_muon_without_a_matrix_to_train_is_one_sentence():
    with pytest.raises(ConfigError, match="'muon' found no trained matrix in the layers of Linear"):
        build_optimizer(torch.nn.Linear(2, 2), TrainSettings(optimizer=MUON))


def test_8_bit_state_without_torchao_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"needs torchao, .* run `pip install torchao`"):
        build_optimizer(torch.nn.Linear(2, 2), TrainSettings(optimizer=ADAMW_8BIT))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_pass_that_checkpoints_layers_keeps_no_16_bit_copies_of_weights(gradient_checkpointing):
    settings = TrainSettings(
        compute_dtype=torch.bfloat16, gradient_checkpointing=gradient_checkpointing
    )
    with settings.numerics(torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled() == (not gradient_checkpointing)
