"""Write docs/reference/configuration.md: `python tools/write_configuration.py`."""

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.config import RunConfig, TaskPlace, TasksConfig

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
INTRODUCTION = """# Configuration

All settings and their defaults. The same names work in a TOML file, as keyword arguments of
`mr.train` (`trainer={"steps": 10}`) and on the command line (`--trainer.steps 10`). Relative paths
in a TOML start from the folder of that TOML. An unknown key is an error that names the nearest
valid one.

Where a table has a `type`, the name alone stands for the table: `loss = "grpo"`,
`scorers = ["exact"]`, `[buffer] order = "freshest"`.

`python tools/write_configuration.py` writes this page from `src/millrace/config/`.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, _table("", RunConfig), *_tables(RunConfig)])


def _tables(section: type[BaseModel], *, above: str = "") -> Iterator[str]:
    """The tables within a section, each followed by the tables within it."""
    for name, field in section.model_fields.items():
        below = _section(field)
        if below is not None:
            origin = typing.get_origin(field.annotation)
            path = f"{above}{name}.NAME" if origin is dict else f"{above}{name}"
            heading = f"[[{path}]]" if origin is tuple else f"[{path}]"
            yield _table(heading, below, text=_text(field))
            yield from _tables(below, above=f"{path}.")


def _table(heading: str, section: type[BaseModel], *, text: str = "") -> str:
    rows = [f"## `{heading}`\n" if heading else "## Top level\n"]
    rows += [f"{text}\n"] if text else []
    fields = {n: f for n, f in section.model_fields.items() if _section(f) is None}
    if issubclass(section, TaskPlace) and section is not TasksConfig:
        shared = ", ".join(f"`{name}`" for name in TaskPlace.model_fields)
        rows.append(f"Takes the keys {shared} of `[tasks]`, and:\n")
        fields = {n: f for n, f in fields.items() if n not in TaskPlace.model_fields}
    rows += ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        rows.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_text(field)} |")
    return "\n".join(rows) + "\n"


def _text(field: FieldInfo) -> str:
    return (field.description or "").strip().replace("\n", " ").replace("|", "\\|")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The type of a field's section, also if it is optional or repeated; None for a plain field."""
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _type(field: FieldInfo) -> str:
    return _spelled(field.annotation).replace("|", "\\|")


def _spelled(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _spelled(arguments[0])
    if origin is typing.Literal:
        return " | ".join(f'"{argument}"' for argument in arguments)
    if origin in (tuple, list):
        return "list of " + _spelled(arguments[0])
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if origin is dict or is_table:
        return "table"
    if arguments:
        return " | ".join(_spelled(a) for a in arguments if a is not type(None))
    names = {str: "text", int: "integer", float: "number", bool: "true/false"}
    return names.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return ""
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f'{k} = "{v}"' for k, v in value.items()) + "}`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
