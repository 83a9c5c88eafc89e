"""Plug-ins are their own config: a frozen dataclass whose fields are its TOML keys."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.references import load_reference


def build_plugin(
    table: Mapping[str, Any], *, builtins: Mapping[str, type], default: str, section: str
) -> Any:
    """The object a table like {type = "clipped", high = 0.28} describes."""
    settings = dict(table)
    name = settings.pop("type", default)
    if not isinstance(name, str):
        raise ConfigError(
            f"Setting '{section}.type' = {name!r} is not a name; built in: {', '.join(builtins)}."
        )
    cls = builtins.get(name)
    if cls is None:
        if ":" not in name:
            close = difflib.get_close_matches(name, builtins, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"built in: {', '.join(builtins)}."
            raise ConfigError(f"Setting '{section}.type' = {name!r} is not known; {hint}")
        cls = load_reference(name)
    if not dataclasses.is_dataclass(cls):
        return _call(cls, settings, section=section)
    valid = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in settings:
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            names = ", ".join(valid) or "none"
            hint = f"did you mean {close[0]!r}?" if close else f"valid here: {names}."
            raise ConfigError(f"Unknown setting '{section}.{key}' of {name!r}; {hint}")
    return _call(cls, settings, section=section)


def build_callable(
    table: Mapping[str, Any],
    *,
    builtins: Mapping[str, type],
    default: str,
    section: str,
    keywords: Sequence[str] = (),
) -> Any:
    """As build_plugin, but the type may also be "module:function", which is given the other keys
    with every call, beside its one argument and these keywords."""
    name = table.get("type", default)
    if not isinstance(name, str) or ":" not in name:
        return build_plugin(table, builtins=builtins, default=default, section=section)
    function = load_reference(name)
    if not callable(function) or inspect.isclass(function):
        return build_plugin(table, builtins=builtins, default=default, section=section)
    settings = {key: value for key, value in table.items() if key != "type"}
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(keywords), **settings)
    except TypeError as error:
        raise ConfigError(f"Section '{section}' does not fit {name!r}: {error}.") from None
    return functools.partial(function, **settings)


def _call(cls: Any, settings: dict[str, Any], *, section: str) -> Any:
    try:
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section '{section}' does not fit: {error}.") from None
