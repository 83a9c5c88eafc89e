import math
from dataclasses import dataclass

import pytest
from loss_tokens import MAX_NEW_TOKENS, gradient, loss_of, tokens_of

from millrace.core.errors import ConfigError
from millrace.training.losses.loss import aggregate
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.recipes import RECIPES, build_loss
from millrace.training.losses.surrogates import Clip, Reinforce
from millrace.training.losses.weights import LossAverage, Ratio


def test_a_recipe_is_a_table_of_settings_of_the_parts():
    assert loss_of("gspo") == PolicyLoss(
        ratio=Ratio(ratio="geometric"),
        surrogate=Clip(low=3e-4, high=4e-4),
        average=LossAverage(aggregation="sequence"),
    )


def test_any_part_of_a_recipe_can_be_changed():
    loss = loss_of("gspo", high=5e-4, anchor="proximal", aggregation="token")
    assert loss.surrogate == Clip(low=3e-4, high=5e-4)
    assert loss.ratio == Ratio(ratio="geometric", anchor="proximal")
    assert loss.average == LossAverage()


def test_another_surrogate_does_not_inherit_the_bounds_of_the_recipes_own():
    assert loss_of("ppo", surrogate="reinforce", cap=4).surrogate == Reinforce(cap=4)
    assert loss_of("cispo", surrogate="clip", low=0.1).surrogate == Clip(low=0.1)


def test_without_a_type_the_loss_is_the_default_one():
    assert build_loss({}, max_new_tokens=1) == PolicyLoss() == loss_of("clipped")


@pytest.mark.parametrize("name", RECIPES)
def test_only_recipes_that_compare_with_the_proximal_policy_need_it(name):
    assert loss_of(name).needs_proximal == (name == "decoupled_ppo")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"type": "grop"}, "'loss.type' = 'grop' is not known; did you mean 'grpo'?"),
        (
            {"type": 3},
            "'loss.type' = 3 is not a name; write 'module:Name' or a built-in one: clipped,",
        ),
        ({"hihg": 0.3}, "Unknown setting 'loss.hihg' of 'clipped'; did you mean 'high'?"),
        ({"zzz": 0.3}, "Unknown setting 'loss.zzz' of 'clipped'; valid here: surrogate, low, high"),
        ({"type": "cispo", "dual": 3.0}, "'loss.dual' = 3.0 belongs to surrogate = 'clip',"),
        ({"type": "ppo", "tau": 1}, "belongs to surrogate = 'kimi' or 'prime_rl', which 'ppo'"),
        ({"surrogate": "clipp"}, "'loss.surrogate' = 'clipp' is unknown; did you mean 'clip'?"),
        ({"surrogate": ["clip"]}, "'loss.surrogate' = ['clip'] is unknown; "),
        ({"surrogate": "json:dumps"}, "'loss.surrogate' = 'json:dumps' is not a dataclass; make"),
        ({"shape": "clip"}, "'loss.shape' is now called 'loss.surrogate'."),
        ({"low": 1.2}, "'loss.low' = 1.2: input should be less than or equal to 1"),
        ({"low": 0}, "'loss.low' = 0: input should be greater than 0"),
        ({"high": 0.0}, "'loss.high' = 0.0: input should be greater than 0"),
        ({"high": "much"}, "'loss.high' = 'much': input should be a valid number"),
        ({"high": True}, "'loss.high' = True: input should be a valid number"),
        ({"high": math.nan}, "'loss.high' = nan: input should be greater than 0"),
        ({"max_ratio": 1.1}, "max_ratio = 1.1 must be at least 1 + high"),
        ({"dual": 3.0}, "dual = 3.0 and max_ratio = 2.0 bound the same side; set one of them"),
        ({"type": "ppo", "high": math.inf}, "dual = 3.0 bounds the clipped ratio, but"),
        (
            {"type": "cispo", "cap": 0.5},
            "'loss.cap' = 0.5: input should be greater than or",
        ),
        ({"aggregation": "word"}, "'loss.aggregation' = 'word': input should be 'token', 'seq"),
        ({"length": 9}, "length = 9 needs aggregation = 'constant', not 'token'"),
        (
            {"type": "dr_grpo", "length": 0},
            "'loss.length' = 0: input should be greater than",
        ),
        ({"ratio": "word"}, "'loss.ratio' = 'word': input should be 'token', 'turn', 'seq"),
        ({"anchor": "old"}, "'loss.anchor' = 'old': input should be 'engine', 'proximal' or"),
        ({"correction": "truncate"}, "'engine' is the engine; set anchor to 'proximal', or"),
        ({"correction_high": 0.5}, "'loss.correction_high' = 0.5: input should be greater than or"),
        ({"staleness_half_life": 2.0}, "has no effect without a limit; set max_token"),
        ({"kl": -1}, "'loss.kl' = -1: input should be greater than or equal to 0"),
        ({"kl_weighted": "yes"}, "'loss.kl_weighted' = 'yes': input should be a valid boolean"),
        ({"entropy_target": 1.0, "entropy_bonus": 0.1}, "is above entropy_bonus_max = 0.05"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(settings, expected):
    with pytest.raises(ConfigError) as caught:
        build_loss(settings, max_new_tokens=MAX_NEW_TOKENS)
    assert expected in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


@dataclass(frozen=True, kw_only=True)
class MyLoss:
    scale: float = 1.0

    def __call__(self, tokens):
        return self.scale * aggregate(tokens.trainer_logprobs, tokens, by="token"), {}


@dataclass(frozen=True, kw_only=True)
class MySurrogate:
    power: float = 1.0

    def __call__(self, policy):
        return (self.power * policy.log_ratio).exp() * policy.advantages, {}


def test_a_users_loss_is_found_by_reference():
    loss = build_loss({"type": f"{__file__}:MyLoss", "scale": 3.0}, max_new_tokens=1)
    assert loss.scale == 3.0
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        build_loss({"type": f"{__file__}:MyLoss", "scall": 3.0}, max_new_tokens=1)


def test_a_users_surrogate_is_combined_with_the_other_parts():
    loss = loss_of("gspo", surrogate=f"{__file__}:MySurrogate", power=2.0)
    tokens = tokens_of([1.0, 1.0], [1.0, 1.0])
    assert gradient(loss, tokens).tolist() == pytest.approx([-1.0, -1.0])
