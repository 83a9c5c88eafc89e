"""Losses by name: a recipe is a table of settings for the parts of PolicyLoss. Online DPO and
supervised fine-tuning are losses of their own.

    [loss]
    type = "gspo"       # a recipe
    high = 5e-4         # replaces a setting of the recipe

Promise: a wrong key, value or combination is reported in one sentence before any process starts. A
pair of DPO lies in one microbatch, so the batch's loss does not depend on how it is split.
N = trained tokens of a microbatch.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from millrace.core.errors import ConfigError, suggestion
from millrace.core.plugins import build_plugin, load_reference, plugin
from millrace.training.losses.loss import Loss, Positive, TokenBatch, aggregate
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.surrogates import SURROGATES

if TYPE_CHECKING:
    from torch import Tensor


@plugin
class PreferenceLoss:
    """DPO (arXiv 2305.18290) on fresh pairs: -log sigmoid(beta * margin), averaged over pairs.

    The margin is the sum of log pi - reference over the tokens of the better sequence, minus that
    of the worse. The sign of the advantages ("best_worst") says which is which.
    """

    beta: Positive = 0.1
    """DPO beta: coefficient of the implicit reward, above 0."""
    reference: Literal["engine", "reference"] = "engine"
    """Reference policy of DPO: "engine", the logprobs that tokens were sampled with, or
    "reference", a reference model."""

    @property
    def needs_reference(self) -> bool:
        return self.reference == "reference"

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        groups = tokens.groups
        assert groups is not None, "batches for a preference loss are packed with pairs=True"
        reference = tokens.reference_logprobs if self.needs_reference else tokens.engine_logprobs
        assert reference is not None, "a run without a reference model is refused at its start"
        sign = tokens.advantages.sign()
        margin = groups.sum(sign * (tokens.trainer_logprobs - reference))  # [N]; of its group
        has_pair = groups.sum(sign.abs()) > 0
        per_group = margin.new_zeros(()).logaddexp(-self.beta * margin) * has_pair
        loss = (per_group / groups.lengths[groups.ids]).sum() / tokens.num_groups
        metrics = {
            "preference/margin": margin.detach(),
            "preference/accuracy": (margin > 0).float(),
        }
        return loss, metrics


@plugin
class SupervisedLoss:
    """Cross-entropy, averaged over the trained tokens of the batch; advantages do not count."""

    def __call__(self, tokens: TokenBatch) -> "tuple[Tensor, Mapping[str, Tensor]]":
        return aggregate(-tokens.trainer_logprobs, tokens, by="token"), {}


SECTION = "loss"
DEFAULT = "clipped"
DEFAULT_SURROGATE = "clip"
PREFERENCE = "online_dpo"
SUPERVISED = "sft"

_DECOUPLED = {"low": 0.2, "high": 0.2, "correction": "truncate", "correction_high": 5.0}
_SUMMED = {"aggregation": "constant", "length": 1}  # over tokens, so that long sequences weigh more
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "clipped": {"low": 0.2, "high": 0.28, "max_ratio": 2.0},
    "ppo": {"low": 0.2, "high": 0.2, "dual": 3.0},
    "grpo": {"low": 0.2, "high": 0.2, "aggregation": "sequence"},
    "dapo": {"low": 0.2, "high": 0.28},
    "dr_grpo": {"low": 0.2, "high": 0.2, "aggregation": "constant"},
    "gspo": {"ratio": "geometric", "low": 3e-4, "high": 4e-4, "aggregation": "sequence"},
    "rloo": {"ratio": "sequence", "low": 0.2, "high": 0.2, "aggregation": "sequence"},
    "reinforce_pp": {"low": 0.2, "high": 0.2, "kl_estimator": "k2"},
    "cispo": {"surrogate": "reinforce", "cap": 5.0},
    "tis": {"surrogate": "reinforce", "cap": 2.0},
    "icepop": {"surrogate": "reinforce", "floor": 0.5, "cap": 5.0, "outside": "zero"},
    "topr": {"surrogate": "topr", "ratio": "sequence"},
    "kimi": {"surrogate": "kimi", "tau": 0.1},
    "sapo": {"surrogate": "sapo", "aggregation": "sequence"},
    "prime_rl": {"surrogate": "prime_rl"},
    "decoupled_ppo": {"anchor": "proximal", **_DECOUPLED},
    "a3po": {"anchor": "interpolated", **_DECOUPLED},
    "m2po": {"low": 1.0, "high": math.inf, "second_moment": 0.04},
    "vcpo": {"surrogate": "reinforce", "ratio": "sequence", "cap": 5.0, "ess_scaling": True},
    "vespo": {"surrogate": "vespo", "ratio": "sequence"},
    "luspo": {"ratio": "geometric", "low": 2e-3, "high": 2.5e-3, **_SUMMED},
    "distil": {"surrogate": "reinforce", "cap": 5.0, "distil": "reverse_kl", "reward_weight": 0.0},
}

# Advantage estimators of recipes, used when groups are scored: [scoring] advantages = "auto".
ADVANTAGES: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {"type": "group", "normalize_std": False},
    "rloo": {"type": "leave_one_out"},
    "reinforce_pp": {"type": "batch"},
    PREFERENCE: {"type": "best_worst"},
    "kimi": {"type": "group", "normalize_std": False},
}

# The classes of the parts of a PolicyLoss, by its fields.
_PARTS: Mapping[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(PolicyLoss)
    if field.name != "surrogate"
}


def build_loss(table: Mapping[str, Any], *, max_new_tokens: int) -> Loss:
    """The loss of a [loss] table; `max_new_tokens` is the default of `length`."""
    settings = dict(table)
    name = settings.pop("type", DEFAULT)
    if not isinstance(name, str) or name not in RECIPES:
        others = {PREFERENCE: PreferenceLoss, SUPERVISED: SupervisedLoss}
        named = {**dict.fromkeys(RECIPES, PolicyLoss), **others}
        return build_plugin(table, builtins=named, default=DEFAULT, section=SECTION)
    settings = {**_recipe(name, keeps_surrogate="surrogate" not in settings), **settings}
    if settings.get("aggregation") == "constant":
        settings.setdefault("length", max_new_tokens)
    elif "length" not in table:  # it belongs to the recipe's own average
        settings.pop("length", None)
    parts = {"surrogate": _surrogate(settings.pop("surrogate", DEFAULT_SURROGATE)), **_PARTS}
    _check_keys(settings, name=name, valid=[key for part in parts.values() for key in _keys(part)])
    built = {
        field: _build(part, {key: settings[key] for key in _keys(part) if key in settings})
        for field, part in parts.items()
    }
    return _build(PolicyLoss, built)


def _build(part: type, settings: Mapping[str, Any]) -> Any:
    return build_plugin(settings, builtins={"": part}, default="", section=SECTION)


def _recipe(name: str, *, keeps_surrogate: bool) -> dict[str, Any]:
    """The settings of a recipe, without those of its surrogate if another one replaces it."""
    settings = dict(RECIPES[name])
    surrogate = settings.get("surrogate", DEFAULT_SURROGATE)
    own_keys = () if keeps_surrogate else _keys(SURROGATES[surrogate])
    return {key: value for key, value in settings.items() if key not in own_keys}


def _surrogate(name: Any) -> type:
    if isinstance(name, str) and ":" in name:
        surrogate = load_reference(name)
        if not dataclasses.is_dataclass(surrogate):
            raise ConfigError(
                f"Setting '{SECTION}.surrogate' = {name!r} is not a dataclass; make it a frozen one"
                " whose fields are its settings."
            )
        return surrogate  # pyright: ignore[reportReturnType] - a class, as an instance has no name
    if not isinstance(name, str) or name not in SURROGATES:
        hint = suggestion(str(name), SURROGATES, otherwise="built in")
        raise ConfigError(f"Setting '{SECTION}.surrogate' = {name!r} is unknown; {hint}")
    return SURROGATES[name]


def _keys(part: type) -> list[str]:
    return [field.name for field in dataclasses.fields(part) if field.init]


def _check_keys(settings: Mapping[str, Any], *, name: str, valid: list[str]) -> None:
    for key, value in settings.items():
        if key in valid:
            continue
        setting = f"'{SECTION}.{key}'"
        if key == "shape":
            raise ConfigError(f"Setting {setting} is now called '{SECTION}.surrogate'.")
        owners = [surrogate for surrogate, cls in SURROGATES.items() if key in _keys(cls)]
        if owners:
            surrogates = " or ".join(repr(owner) for owner in owners)
            raise ConfigError(
                f"Setting {setting} = {value!r} belongs to surrogate = {surrogates}, which {name!r}"
                " does not use here; leave it out, or set that surrogate."
            )
        hint = suggestion(key, ["surrogate", *valid])
        raise ConfigError(f"Unknown setting {setting} of {name!r}; {hint}")
