"""Write src/millrace/config/keywords.pyi: `python tools/write_keywords.py`."""

import textwrap
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from millrace.config import ModelConfig, RunConfig

STUB = Path(__file__).parents[1] / "src" / "millrace" / "config" / "keywords.pyi"
OBJECTS = ("tasks", "scorers", "environment")  # mr.train has arguments of these names
HEADER = '''\
"""Written by `python tools/write_keywords.py` from the settings models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict
'''
ARGUMENTS = '''\
    tasks: Sequence[Any] | None
    """Tasks to train on: prompts, dicts or mr.Task."""
    eval_tasks: Sequence[Any] | None
    """Held-out tasks."""
    scorers: Sequence[Callable[..., Any] | str | Mapping[str, Any]] | Callable[..., Any] | str
    """Scorers, added to those of the settings."""
    environment: Callable[..., Any] | Mapping[str, Any] | None
    """Environment function, or its table."""
    callbacks: Sequence[Any]
    """Objects with hooks of mr.Callback."""
    preset: str | None
    """Name of a design, of `millrace presets`."""
'''


def stub() -> str:
    sections: dict[type[BaseModel], None] = {}
    _collect(RunConfig, sections)
    del sections[RunConfig]
    classes = [_class(section) for section in sections]
    return "\n".join([HEADER, *classes, _class(RunConfig, leave_out=OBJECTS) + ARGUMENTS])


def _collect(section: type[BaseModel], found: dict[type[BaseModel], None]) -> None:
    """The section and all sections within it, the innermost first."""
    for name, field in section.model_fields.items():
        if section is not RunConfig or name not in OBJECTS:
            for below in _sections(field.annotation):
                _collect(below, found)
    found[section] = None


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [below for each in typing.get_args(annotation) for below in _sections(each)]


def _is_open(section: type[BaseModel]) -> bool:
    """True if it takes the keys of a plug-in, which no type can list."""
    return section.model_config.get("extra") == "allow"


def _class(section: type[BaseModel], *, leave_out: tuple[str, ...] = ()) -> str:
    lines = [f"class {_name(section)}(TypedDict, total=False):"]
    for name, field in section.model_fields.items():
        if name not in leave_out:
            lines.append(f"    {name}: {_type(field.annotation)}")
            text = textwrap.fill((field.description or "").replace("\\", "\\\\"), 90)
            lines += textwrap.indent(f'"""{text}"""', "    ").splitlines()
    return "\n".join(lines) + "\n"


def _name(section: type[BaseModel]) -> str:
    if section is RunConfig:
        return "TrainArguments"
    return section.__name__.removesuffix("Config") + "Settings"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')
    if origin in (tuple, list):  # one value stands for a list of one, and a name for its table
        inner = _type(arguments[0])
        return f"Sequence[{inner}]" if inner == "float" else f"str | Sequence[{inner}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        name = _name(annotation)
        if annotation is ModelConfig:  # a path alone stands for its table
            return f"str | {name}"
        return f"str | {name} | Mapping[str, Any]" if _is_open(annotation) else name
    if origin is dict:
        inner = _type(arguments[1])
        return f"str | Mapping[str, {inner}]" if inner == "Any" else f"Mapping[str, {inner}]"
    if arguments:
        return " | ".join(map(_type, arguments))
    names: dict[Any, str] = {type(None): "None", Any: "Any"}
    return names.get(annotation) or annotation.__name__


if __name__ == "__main__":
    STUB.write_text(stub())
