"""Objectives by name: a recipe is a table of settings of the parts, and nothing else.

    [loss]
    type = "gspo"       # a recipe ...
    high = 5e-4         # ... and what is different here

Promise: a wrong key, value or combination is one sentence before any process starts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin, load_reference
from millrace.core.spelling import suggestion
from millrace.training.losses.distillation import Distillation
from millrace.training.losses.loss import Loss
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.preference import PreferenceLoss
from millrace.training.losses.ratios import Ratio
from millrace.training.losses.regularisers import EntropyBonus, ReferenceKl
from millrace.training.losses.shapes import SHAPES
from millrace.training.losses.weights import Correction, LossAverage, OffPolicyMask, StalenessWeight

SECTION = "loss"
DEFAULT = "clipped"
DEFAULT_SHAPE = "clip"
PREFERENCE = "online_dpo"

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "clipped": {"low": 0.2, "high": 0.28, "max_ratio": 2.0},
    "ppo": {"low": 0.2, "high": 0.2, "dual": 3.0},
    "grpo": {"low": 0.2, "high": 0.2, "aggregation": "sequence"},
    "dapo": {"low": 0.2, "high": 0.28},
    "dr_grpo": {"low": 0.2, "high": 0.2, "aggregation": "constant"},
    "gspo": {"ratio": "geometric", "low": 3e-4, "high": 4e-4, "aggregation": "sequence"},
    "rloo": {"ratio": "sequence", "low": 0.2, "high": 0.2, "aggregation": "sequence"},
    "reinforce_pp": {"low": 0.2, "high": 0.2, "kl_estimator": "k2"},
    "cispo": {"shape": "reinforce", "cap": 5.0},
    "tis": {"shape": "reinforce", "cap": 2.0},
    "icepop": {"shape": "reinforce", "floor": 0.5, "cap": 5.0, "outside": "zero"},
    "topr": {"shape": "topr", "ratio": "sequence"},
    "kimi": {"shape": "kimi", "tau": 0.1},
    "sapo": {"shape": "sapo", "aggregation": "sequence"},
    "prime_rl": {"shape": "prime_rl"},
    "decoupled_ppo": {
        "anchor": "proximal",
        "low": 0.2,
        "high": 0.2,
        "correction": "truncate",
        "correction_high": 5.0,
    },
    "a3po": {
        "anchor": "interpolated",
        "low": 0.2,
        "high": 0.2,
        "correction": "truncate",
        "correction_high": 5.0,
    },
    "distil": {"shape": "reinforce", "cap": 5.0, "distil": "reverse_kl", "reward_weight": 0.0},
}

# What belongs to a recipe but is settled when groups are scored: [scoring] advantages = "auto".
ADVANTAGES: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {"type": "group", "normalize_std": False},
    "rloo": {"type": "leave_one_out"},
    "reinforce_pp": {"type": "batch"},
    PREFERENCE: {"type": "best_worst"},
    "kimi": {"type": "group", "normalize_std": False},
}

_PARTS: Mapping[str, type] = {
    "ratio": Ratio,
    "correction": Correction,
    "staleness": StalenessWeight,
    "off_policy": OffPolicyMask,
    "average": LossAverage,
    "distil": Distillation,
    "kl": ReferenceKl,
    "entropy": EntropyBonus,
}


def build_loss(table: Mapping[str, Any], *, max_new_tokens: int) -> Loss:
    """The loss of a [loss] table; `max_new_tokens` is the length that a constant one stands for."""
    settings = dict(table)
    name = settings.pop("type", DEFAULT)
    if not isinstance(name, str) or name not in RECIPES:
        named = {**dict.fromkeys(RECIPES, PolicyLoss), PREFERENCE: PreferenceLoss}
        return build_plugin(table, builtins=named, default=DEFAULT, section=SECTION)
    settings = {**_recipe(name, keeps_shape="shape" not in settings), **settings}
    if settings.get("aggregation") == "constant":
        settings.setdefault("length", max_new_tokens)
    shape = _shape(settings.pop("shape", DEFAULT_SHAPE))
    parts = {"shape": shape, **_PARTS}
    _check_keys(settings, name=name, valid=[key for part in parts.values() for key in _keys(part)])
    try:
        return PolicyLoss(
            **{
                field: part(**{key: settings[key] for key in _keys(part) if key in settings})
                for field, part in parts.items()
            }
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section '{SECTION}' does not fit: {error}.") from None


def _recipe(name: str, *, keeps_shape: bool) -> dict[str, Any]:
    """Its settings; another shape is not given those of the recipe's own."""
    settings = dict(RECIPES[name])
    shape = settings.get("shape", DEFAULT_SHAPE)
    return {k: v for k, v in settings.items() if keeps_shape or k not in _keys(SHAPES[shape])}


def _shape(name: Any) -> type:
    if isinstance(name, str) and ":" in name:
        shape = load_reference(name)
        if not dataclasses.is_dataclass(shape):
            raise ConfigError(
                f"Setting '{SECTION}.shape' = {name!r} is no dataclass; make it a frozen one whose"
                " fields are its settings."
            )
        return shape  # pyright: ignore[reportReturnType] - a class, as an instance has no name
    if not isinstance(name, str) or name not in SHAPES:
        hint = suggestion(str(name), SHAPES, otherwise="built in")
        raise ConfigError(f"Setting '{SECTION}.shape' = {name!r} is not known; {hint}")
    return SHAPES[name]


def _keys(part: type) -> list[str]:
    return [field.name for field in dataclasses.fields(part) if field.init]


def _check_keys(settings: Mapping[str, Any], *, name: str, valid: list[str]) -> None:
    for key, value in settings.items():
        if key in valid:
            continue
        setting = f"'{SECTION}.{key}'"
        owners = [shape for shape, cls in SHAPES.items() if key in _keys(cls)]
        if owners:
            shapes = " or ".join(repr(owner) for owner in owners)
            raise ConfigError(
                f"Setting {setting} = {value!r} belongs to shape = {shapes}, which {name!r} is not"
                " here; leave it out, or set that shape."
            )
        hint = suggestion(key, ["shape", *valid])
        raise ConfigError(f"Unknown setting {setting} of {name!r}; {hint}")
