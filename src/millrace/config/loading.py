"""Settings from TOML files, mappings and the command line; what is wrong with them, as sentences.

Torch-free.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from millrace.config.run_config import RunConfig
from millrace.config.tasks import HUB
from millrace.core.errors import ConfigError

# Settings that are paths.
_PATHS = (
    "run_dir",
    "tasks.path",
    "tasks.source.path",
    "evaluate.path",
    "scorer.path",
    "cluster.ticket",
    "weights.directory",
)

# Of these, words that are files beside the TOML.
_COMMANDS = ("environment.command", "environment.mcp.command")


def load_config(
    source: str | Path | Mapping[str, Any] | RunConfig | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read settings from a TOML file, a mapping, or nothing, with dotted or nested overrides on
    top."""
    if isinstance(source, RunConfig):
        table = source.model_dump(mode="python")
    elif isinstance(source, Mapping):
        table = {**source}
    elif source is None:
        table = {}
    else:
        table = _read_toml(Path(source))
    for key, value in (overrides or {}).items():
        table = _merged(table, key.split("."), value)
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def parse_override(text: str) -> Any:
    """A command-line value as TOML would read it; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"No config file {str(path)!r}; `millrace init` writes one to start from."
        ) from None
    except OSError as error:
        raise ConfigError(f"Config file {str(path)!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    return _anchored(table, folder=path.resolve().parent)


def _anchored(value: Any, *, folder: Path, key: str = "") -> Any:
    """Relative paths in a TOML start from the folder of that TOML."""
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return {
            k: _anchored(v, folder=folder, key=f"{key}.{k}".strip(".")) for k, v in table.items()
        }
    if isinstance(value, list):
        return [_anchored(row, folder=folder, key=key) for row in cast(list[Any], value)]
    if not isinstance(value, str):
        return value
    # A model may also be a hub name, which is no path at all; a reference to a file holds ".py:".
    # What a command names is a file beside the TOML, or anything else.
    may_be_path = ("model", "model.path", "critic.path", "scorer.model", *_COMMANDS)
    is_of_role = key.startswith("environment.models.") and key.endswith(".path")
    is_found = (key in may_be_path or is_of_role) and (folder / value).exists()
    is_path = (key in _PATHS and not value.startswith(HUB)) or key.startswith("engine.adapters.")
    return str(folder / value) if is_found or is_path or ".py:" in value else value


def _merged(table: Mapping[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    """`table` with a setting on top; a table on top of a table leaves its other keys alone."""
    head, *rest = keys
    below = cast(dict[str, Any], table[head]) if isinstance(table.get(head), Mapping) else {}
    if rest:
        value = _merged(below, rest, value)
    elif isinstance(value, Mapping):
        value = {**below, **cast(Mapping[str, Any], value)}
    return {**table, head: value}


def _sentence(error: ValidationError) -> str:
    sentence = "; ".join(_clauses(error))
    return sentence if sentence.endswith("?") else f"{sentence}."


def _clauses(error: ValidationError) -> Iterator[str]:
    for detail in error.errors():
        path = [str(part) for part in detail["loc"]]
        where = ".".join(path)
        if detail["type"] == "extra_forbidden":
            yield f"Unknown setting {where!r}{_nearest(path)}"
        elif detail["type"] == "missing":
            yield f"Setting {where!r} is missing"
        elif not path:
            yield detail["msg"].removeprefix("Value error, ")
        else:
            words = detail["msg"].removeprefix("Value error, ")
            message = words[0].lower() + words[1:]
            yield f"Setting {where!r} = {detail['input']!r}: {message}"


def _nearest(path: list[str]) -> str:
    """A hint at the key that was probably meant."""
    section: type[BaseModel] = RunConfig
    for part in path[:-1]:
        field = section.model_fields.get(part)
        if part.isdigit():
            continue
        annotation = field.annotation if field else None
        if get_args(annotation):  # a section that may be left out, or of which there are several
            annotation = get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        section = annotation
    names = list(section.model_fields)
    close = difflib.get_close_matches(path[-1], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid here: {', '.join(names)}"
