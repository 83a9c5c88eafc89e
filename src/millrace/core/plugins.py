"""User code by name: "package.module:Name", or "path/to/file.py:Name".

Plug-ins are their own config: a frozen dataclass whose fields are its TOML keys. The built-in ones
are checked by pydantic: the types of their fields say which values they take.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses

from millrace.core.errors import ConfigError, describe_setting_error, suggestion

Settings = TypeVar("Settings")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def plugin(cls: type[Settings]) -> type[Settings]:
    """Make a class a frozen dataclass that checks its fields; raises a ValueError."""
    strict = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    decorate: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)
    return decorate(cls)


def check_exactly_one(reason: str, /, **settings: Any) -> None:
    """Raise ValueError unless one setting is not None; `reason` says why one is needed."""
    if sum(value is not None for value in settings.values()) != 1:
        raise ValueError(f"{reason}; set either {' or '.join(settings)}")


def load_reference(reference: str) -> Any:
    """Import the object. The path of a file is relative to the working directory."""
    module_name, separator, attribute = reference.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(
            f"{reference!r} is not a reference; write 'package.module:Name' or 'file.py:Name'."
        )
    module = _load_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"{module_name!r} has no {attribute!r}; check the name after the colon."
        ) from None


def _load_module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the user's module exists, and one of its own imports is missing
            raise ConfigError(
                f"No module named {name!r}; is it installed or on PYTHONPATH?"
            ) from None
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"No file {str(path)!r}; paths in a TOML are relative to its folder.")
    # The name must be the same in every process, and free of clashes between folders.
    module_name = f"millrace_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]  # the next import must not find half a module
        raise
    return module


def build_plugin(
    table: Mapping[str, Any], *, builtins: Mapping[str, type], default: str, section: str
) -> Any:
    """Build the object that a table such as {type = "clipped", high = 0.28} describes."""
    settings = dict(table)
    name = settings.pop("type", default)
    if not isinstance(name, str):
        raise ConfigError(
            f"Setting '{section}.type' = {name!r} is not a name; write 'module:Name' or a built-in"
            f" one: {', '.join(builtins)}."
        )
    cls = builtins.get(name)
    if cls is None:
        if ":" not in name:
            hint = suggestion(name, builtins, otherwise="built in")
            raise ConfigError(f"Setting '{section}.type' = {name!r} is not known; {hint}")
        cls = load_reference(name)
    build: Callable[..., Any] = cls
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        valid = [field.name for field in dataclasses.fields(cls) if field.init]
        for key in settings:
            if key not in valid:
                hint = suggestion(key, valid)
                raise ConfigError(f"Unknown setting '{section}.{key}' of {name!r}; {hint}")
        if not pydantic.dataclasses.is_pydantic_dataclass(cls):
            _check_simple_fields(cls, settings, section=section)
    try:
        return build(**settings)
    except pydantic.ValidationError as error:
        clauses = [
            describe_setting_error(detail, where=f"{section}.{'.'.join(map(str, detail['loc']))}")
            if detail["loc"]
            else f"Section '{section}' does not fit: {detail['msg'].removeprefix('Value error, ')}"
            for detail in error.errors()
        ]
        raise ConfigError(f"{'; '.join(clauses)}.") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section '{section}' does not fit: {error}.") from None


def _check_simple_fields(cls: type, settings: Mapping[str, Any], *, section: str) -> None:
    """Raise ConfigError for a value that is not of the type of its field, if that is a number, a
    text or a truth value; other types mean to a user's class what it makes of them."""
    kinds = {field.name: field.type for field in dataclasses.fields(cls)}
    strict = pydantic.ConfigDict(strict=True)
    for key, value in settings.items():
        # With `from __future__ import annotations`, types are given by name.
        kind = next((t for t in (bool, float, int, str) if kinds[key] in (t, t.__name__)), None)
        if kind is None:
            continue
        try:
            pydantic.TypeAdapter(kind, config=strict).validate_python(value)
        except pydantic.ValidationError as error:
            problem = describe_setting_error(error.errors()[0], where=f"{section}.{key}")
            raise ConfigError(f"{problem}.") from None


def build_callable(
    table: Mapping[str, Any],
    *,
    builtins: Mapping[str, type],
    default: str,
    section: str,
    keywords: Sequence[str] = (),
) -> Any:
    """As build_plugin, but the type may also be "module:function". It gets the other keys of the
    table with every call, in addition to its one argument and these keywords."""
    name = table.get("type", default)
    function = load_reference(name) if isinstance(name, str) and ":" in name else None
    if not callable(function) or inspect.isclass(function):
        return build_plugin(table, builtins=builtins, default=default, section=section)
    settings = {key: value for key, value in table.items() if key != "type"}
    try:
        inspect.signature(function).bind(None, **dict.fromkeys(keywords), **settings)
    except TypeError as error:
        raise ConfigError(f"Section '{section}' does not fit {name!r}: {error}.") from None
    return functools.partial(function, **settings)
