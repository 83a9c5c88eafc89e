import math

import pytest
import torch
from architectures import tiny_model

from millrace.core.errors import ConfigError
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
