"""Presets: the designs of other libraries, as settings. One TOML file each.

Promise: a preset sets only what belongs to an axis of its design, below a comment that names the
axis; what a user sets wins, and each axis that is changed this way is reported. Torch-free.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, cast

from millrace.core.errors import ConfigError, suggestion

# The settings of each axis, as prefixes of their dotted keys.
AXES: Mapping[str, tuple[str, ...]] = {
    "Orchestration": ("rollout.max_running_groups",),
    "Buffer": ("buffer.capacity", "buffer.order"),
    "Weight sync": ("weights",),
    "Staleness": ("buffer.max_staleness", "buffer.staleness", "loss"),
    "Partial rollouts": ("engine.kv",),
    "LoRA": ("lora",),
    "Training": (),  # the same for every preset
}
# Tables whose other keys belong to their type.
_TYPED = ("loss", "buffer.order", "buffer.staleness")


def preset_names() -> list[str]:
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def preset_text(name: str) -> str:
    """The TOML of a preset, with its comments."""
    if name not in (names := preset_names()):
        raise ConfigError(f"No preset {name!r}; {suggestion(name, names, otherwise='there are')}")
    return (files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def preset_title(name: str) -> str:
    return preset_text(name).partition("\n")[0].removeprefix("# ")


def presets_json() -> str:
    """A list of names and settings. JSON has no infinity: it is "inf" there, as in TOML."""
    found = [
        {"name": name, "settings": _for_json(tomllib.loads(preset_text(name)))}
        for name in preset_names()
    ]
    return json.dumps(found, indent=2, allow_nan=False)


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return {key: _for_json(below) for key, below in table.items()}
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else str(value)


def axis_of(key: str) -> str | None:
    """The axis of a dotted key; None if it belongs to none."""
    parts = ((axis, prefix) for axis, prefixes in AXES.items() for prefix in prefixes)
    return next((axis for axis, prefix in parts if f"{key}.".startswith(f"{prefix}.")), None)


def over_preset(
    table: Mapping[str, Any], name: str, *, report: Callable[[str], None]
) -> dict[str, Any]:
    """The settings of a preset with those of `table` over them; `report` gets a sentence for each
    axis that `table` changes, also by keys that the preset leaves unset."""
    changes: dict[str | None, list[str]] = {}

    def differs(key: str, own: Any, theirs: Any) -> None:
        rest = ", which it leaves unset" if theirs is None else f" instead of {theirs!r}"
        changes.setdefault(axis_of(key), []).append(f"{key} = {own!r}{rest}")

    merged = _laid_over(tomllib.loads(preset_text(name)), table, differs=differs)
    for axis in (axis for axis in AXES if axis in changes):
        texts = "; ".join(changes[axis])
        report(f"preset {name!r}: your settings override its axis {axis!r}: {texts}.")
    return merged


def _laid_over(
    below: Mapping[str, Any],
    above: Mapping[str, Any],
    *,
    differs: Callable[[str, Any, Any], None],
    path: str = "",
) -> dict[str, Any]:
    """Both tables, key by key; a table of another type replaces the one below. `differs` gets each
    key of `above` that is another one below, or None there."""
    merged = {**below, **above}
    for name, own in above.items():
        key, theirs = f"{path}{name}", below.get(name)
        if key in _TYPED:  # a name alone stands for its table
            theirs, own = ({"type": v} if isinstance(v, str) else v for v in (theirs, own))
        elif theirs is None and isinstance(own, Mapping):
            theirs = {}
        if isinstance(theirs, Mapping) and isinstance(own, Mapping):
            theirs, own = cast(dict[str, Any], theirs), cast(dict[str, Any], own)
            if key not in _TYPED or own.get("type", theirs["type"]) == theirs["type"]:
                merged[name] = _laid_over(theirs, own, differs=differs, path=f"{key}.")
                continue
        if own != theirs:
            differs(key, own, theirs)
    return merged
