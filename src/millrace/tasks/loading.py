"""Loads tasks from files, datasets, functions and Python lists.

Promise: every task that load_tasks() returns has a usable prompt and columns that reach reward
functions unchanged. Anything else raises a ConfigError that names the file and line, or the task,
before any worker starts.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import HUB
from millrace.core.errors import ConfigError
from millrace.core.plugins import load_reference
from millrace.core.records import Prompt, Task
from millrace.tasks.tables import Rows, folder_rows, hub_rows, parquet_rows

Row = Mapping[str, Any] | Task
TaskSource = str | Path | Iterable[Row] | Callable[[], Iterable[Row]]

RESERVED = ("prompts", "completions", "completion_ids")  # arguments of reward functions
INT_RANGE = range(-(2**63), 2**64)  # integers that msgpack can carry


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Selects the columns of a row that make a task."""

    prompt: str = "prompt"
    kept: tuple[str, ...] | None = None  # further columns; None keeps all

    @property
    def read(self) -> tuple[str, ...] | None:
        """Columns to read; None reads all."""
        return None if self.kept is None else tuple(dict.fromkeys((self.prompt, *self.kept)))


def load_tasks(source: TaskSource) -> list[Task]:
    """Tasks from a path, a "module:function" reference, a function, or dicts and Tasks."""
    if isinstance(source, Path):
        return load_path(str(source))
    if isinstance(source, str):
        # A file may have a colon in its name, so what exists on disk wins.
        if ":" not in source or source.startswith(HUB) or Path(source).exists():
            return load_path(source)
        return _from_function(load_reference(source), where=repr(source))
    if callable(source):
        return _from_function(source, where=repr(getattr(source, "__name__", source)))
    return _from_rows(source, where="The list of tasks")


def load_path(path: str, *, fields: Fields | None = None, split: str | None = None) -> list[Task]:
    """Tasks from a JSONL or Parquet file, a folder, "hub:NAME" or "hub:NAME:SUBSET"."""
    fields = fields or Fields()
    rows = _rows(path, columns=fields.read, split=split)
    tasks = [_task(row, where=where, fields=fields) for where, row in rows]
    if not tasks:
        raise ConfigError(f"{path!r} is empty; at least one task is needed.")
    return tasks


def _rows(path: str, *, columns: tuple[str, ...] | None, split: str | None) -> Rows:
    file = Path(path)
    if path.startswith(HUB) and not file.exists():
        name, _, subset = path.removeprefix(HUB).partition(":")
        return hub_rows(name, columns=columns, subset=subset or None, split=split)
    if file.is_dir():
        return folder_rows(file, columns=columns, split=split)
    if split is not None:
        raise ConfigError(f"split = {split!r} is for datasets, not for {path!r}; leave it out.")
    if file.suffix == ".parquet":
        return parquet_rows(file, columns=columns)
    return _jsonl_rows(file)


def _jsonl_rows(path: Path) -> Rows:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"No task file {str(path)!r}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Task file {str(path)!r} cannot be read: {error}.") from None
    # Not splitlines(): it also breaks at characters that JSON strings may hold, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parse_line(line, where=where)


def _parse_line(line: str, *, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON ({error}): {_shown(line)}; write one object per line."
        ) from None


def _from_function(function: Any, *, where: str) -> list[Task]:
    if not callable(function):
        raise ConfigError(
            f"{where} is {_shown(function)}, not a function; name one that returns a list of tasks."
        )
    try:
        rows = function()
    except Exception as error:
        raise ConfigError(
            f"{where} raised {type(error).__name__}: {error}; it is called without arguments and"
            " must return a list of tasks."
        ) from error
    return _from_rows(rows, where=where)


def _from_rows(rows: Any, *, where: str) -> list[Task]:
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{where} gave {_shown(rows)}; a list of tasks is needed.")
    tasks = [_task(row, where=f"Task {index}") for index, row in enumerate(rows)]
    if not tasks:
        raise ConfigError(f"{where} gave no tasks; at least one is needed.")
    return tasks


def _task(row: Any, *, where: str, fields: Fields = Fields()) -> Task:  # noqa: B008 - frozen
    if isinstance(row, Task):
        prompt, columns = row.prompt, row.columns
    elif isinstance(row, Mapping):
        for name in fields.read or (fields.prompt,):
            if name not in row:
                raise ConfigError(
                    f"{where} has no {name!r}, only {_shown(list(row))}; every task needs one"
                    f"{': a text, or a list of messages' if name == fields.prompt else ''}."
                )
        kept = [key for key in row if key != fields.prompt] if fields.kept is None else fields.kept
        columns = {key: row[key] for key in kept}
        prompt = row[fields.prompt]
    else:
        raise ConfigError(
            f"{where} is {_shown(row)}; a task is an object with a 'prompt' and any columns."
        )
    _check_prompt(prompt, where=where)
    _check_columns(columns, where=where)
    return Task(prompt=prompt, columns=dict(columns))


def _check_prompt(prompt: Prompt, *, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError(f"{where} has an empty 'prompt'; write the text to complete.")
    elif not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{where} has the prompt {_shown(prompt)}; it must be a text or a non-empty list of"
            " messages."
        )
    else:
        for message in prompt:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ConfigError(
                    f"{where} has the message {_shown(message)} in its prompt; each must be an"
                    " object with a 'role' and a 'content', both texts."
                )
    if (problem := _problem(prompt)) is not None:
        raise ConfigError(f"{where} has a 'prompt' that holds {problem}.")


def _check_columns(columns: Mapping[str, Any], *, where: str) -> None:
    for name, value in columns.items():
        if name in RESERVED:
            raise ConfigError(
                f"{where} has a column {name!r}, a name that reward functions get from Millrace;"
                " rename the column."
            )
        if (problem := _problem(name if not isinstance(name, str) else value)) is not None:
            raise ConfigError(f"{where} has a column {name!r} that holds {problem}.")


def _problem(value: Any) -> str | None:
    """Explain why a value cannot reach a reward function unchanged; None if it can."""
    # Exact types: subclasses such as numpy's float64 would arrive as something else, or not at all.
    if value is None or type(value) in (bool, float):
        return None
    if type(value) is int:
        too_large = f"{_shown(value)}, which does not fit into 64 bits; write it as a text"
        return None if value in INT_RANGE else too_large
    if type(value) is str:
        # A lone surrogate, from JSON such as "\ud800", has no UTF-8.
        encodable = value.isascii() or value.encode(errors="replace").decode() == value
        return None if encodable else f"{_shown(value)}, which is not valid Unicode; fix the text"
    if isinstance(value, list):
        return next(filter(None, map(_problem, value)), None)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"the key {_shown(key)}; keys must be texts"
        return next(filter(None, map(_problem, [*value, *value.values()])), None)
    return (
        f"{_shown(value)} of type {type(value).__name__}; use texts, numbers, booleans, None, and"
        " lists and dicts of these"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
