"""Write docs/reference/configuration.md: `python tools/write_configuration.py`."""

import ast
import dataclasses
import inspect
import json
import math
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.config import EngineConfig, RunConfig, TaskPlace, TasksConfig
from millrace.inference.backend import BACKENDS
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.recipes import DEFAULT_SURROGATE, RECIPES, PreferenceLoss
from millrace.training.losses.surrogates import SURROGATES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"
INTRODUCTION = """# Configuration

All settings and their defaults. The same names work in a TOML file, as keyword arguments of
`mr.train` (`trainer={"steps": 10}`) and on the command line (`--trainer.steps 10`). Relative paths
in a TOML start from the folder of that TOML. An unknown key is an error that names the nearest
valid one.

Where a table has a `type`, the name alone stands for the table: `loss = "grpo"`,
`scorers = ["exact"]`, `[buffer] order = "freshest"`.

`python tools/write_configuration.py` writes this page from `src/millrace/config/`,
`src/millrace/inference/backend.py` and `src/millrace/training/losses/`.
"""
LOSS_KEYS = """## Keys of `[loss]`

[Losses](losses.md) has the formulas. `sft` takes no keys. Each other recipe takes the keys of its
surrogate and all keys whose cell under "only with" is empty. The last column lists the recipes with
another default. A is the advantage of a token.

| key | only with | type | default | | other defaults |
|---|---|---|---|---|---|"""


def page() -> str:
    parts = [INTRODUCTION, _table("", RunConfig), *_tables(RunConfig)]
    return "\n".join([*parts, "\n".join([LOSS_KEYS, *_loss_rows()]) + "\n"])


def _loss_rows() -> Iterator[str]:
    names = ", ".join(f'"{name}"' for name in SURROGATES)
    text = f'Surrogate objective: {names}, or "module:Name".'
    found = _other_defaults("surrogate", DEFAULT_SURROGATE, RECIPES)
    yield f'| `surrogate` | | text | `"{DEFAULT_SURROGATE}"` | {text} | {found} |'
    for name, surrogate in SURROGATES.items():
        recipes = {r: t for r, t in RECIPES.items() if t.get("surrogate", "clip") == name}
        yield from _keys(surrogate, recipes, only=f'`surrogate = "{name}"`')
    for field in dataclasses.fields(PolicyLoss):
        if field.name != "surrogate":
            part: Any = field.default_factory
            yield from _keys(part, RECIPES)
    yield from _keys(PreferenceLoss, {}, only='`type = "online_dpo"`')


def _keys(part: type, recipes: Mapping[str, Mapping[str, Any]], *, only: str = "") -> Iterator[str]:
    for field, kind, text in _fields(part):
        others = _other_defaults(field.name, field.default, recipes)
        default = _value(field.default)
        yield f"| `{field.name}` | {only} | {kind} | {default} | {text} | {others} |"


def _option_tables() -> Iterator[str]:
    """A table for each engine backend. Backends with the same options share one."""
    names: dict[str, list[str]] = {}
    for name, backend in BACKENDS.items():
        rows = (
            f"| `{field.name}` | {kind} | {_plain_default(field)} | {text} |"
            for field, kind, text in _fields(backend)
        )
        names.setdefault("\n".join(rows), []).append(name)
    for rows, backends in names.items():
        quoted = [f'"{name}"' for name in backends]
        yield f"### Options of {' and '.join(quoted)}\n"
        types = " or ".join(f"`{name}`" for name in quoted)
        yield f"Keys of `[engine.options]` if `engine.type` is {types}.\n"
        yield f"| key | type | default | |\n|---|---|---|---|\n{rows}\n"


def _fields(part: type) -> Iterator[tuple[dataclasses.Field[Any], str, str]]:
    """The fields of a plug-in with their types and descriptions."""
    types, texts = typing.get_type_hints(part, include_extras=True), _docstrings(part)
    for field in dataclasses.fields(part):
        kind, text = _spelled(types[field.name]), texts[field.name]
        yield field, kind.replace("|", "\\|"), text.replace("|", "\\|")


def _plain_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return _value(field.default)


def _other_defaults(key: str, default: Any, recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """The recipes that set this key to something else."""
    values = {name: table[key] for name, table in recipes.items() if key in table}
    return ", ".join(f"`{n}`: {_value(v)}" for n, v in values.items() if v != default)


def _docstrings(part: type) -> dict[str, str]:
    """Of the fields of a dataclass, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(part.__mro__):
        if dataclasses.is_dataclass(base):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            found |= {
                field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
                for field, text in zip(tree.body, tree.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            }
    return found


def _tables(section: type[BaseModel], *, above: str = "") -> Iterator[str]:
    """The tables within a section, each followed by the tables within it."""
    for name, field in section.model_fields.items():
        below = _section(field)
        if below is not None:
            origin = typing.get_origin(field.annotation)
            path = f"{above}{name}.NAME" if origin is dict else f"{above}{name}"
            heading = f"[[{path}]]" if origin is tuple else f"[{path}]"
            yield _table(heading, below, text=_text(field))
            if below is EngineConfig:
                yield from _option_tables()
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
    return _value(field.default)


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isinf(value):
        return "`inf`"
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
