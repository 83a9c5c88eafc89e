"""The tasks of a run: loaded from files, datasets, generators, functions and Python lists, then
ordered and mixed by the [tasks] settings.

Promise: every loaded task has a usable prompt and columns that reach reward functions unchanged.
Anything else raises a ConfigError that names the file and line, or the task, before any worker
starts. Only requested columns are read; rows hold plain Python values where the format has them.

A generator is a plug-in behind [tasks.generator]. Its fields are the keys of the table. It is
called without arguments and returns rows; a user's factory may also return the rows themselves.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millrace.config import HUB, TaskPlace, TasksConfig
from millrace.config.section import NonEmptyStr, PositiveInt
from millrace.core.errors import ConfigError, shortened
from millrace.core.plugins import build_plugin, load_reference, plugin
from millrace.core.records import Prompt, Task
from millrace.scoring.functions.user_function import RESERVED
from millrace.scoring.verifiers.reasoning_gym import COLUMN, make_dataset, puzzle_of, reasoning_gym
from millrace.tasks.streams import Curriculum, Epochs, Mixture, TaskStream

Row = Mapping[str, Any] | Task
Rows = Iterator[tuple[str, dict[str, Any]]]  # (location for error messages, row)
TaskSource = str | Path | Iterable[Row] | Callable[[], Iterable[Row]]

MESSAGES = "messages"  # column of a conversation, where there is no "prompt"
INT_RANGE = range(-(2**63), 2**64)  # integers that msgpack can carry
SAVED = ("dataset_info.json", "dataset_dict.json")  # files that save_to_disk writes
_EXTRA = "which is not installed; install millrace[datasets]"


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


def load_path(path: str, *, columns: Mapping[str, str] | None = None) -> list[Task]:
    """Tasks from a JSONL or Parquet file, a folder, or "hub:NAME:SUBSET:SPLIT". `columns`: columns
    of the tasks and where the path has them; None keeps all."""
    read = None if columns is None else tuple(dict.fromkeys(columns.values()))
    tasks = [_task(row, where=where, columns=columns) for where, row in _rows(path, columns=read)]
    if not tasks:
        raise ConfigError(f"{path!r} is empty; at least one task is needed.")
    return tasks


def _rows(path: str, *, columns: tuple[str, ...] | None) -> Rows:
    file = Path(path)
    if path.startswith(HUB) and not file.exists():
        name, _, rest = path.removeprefix(HUB).partition(":")
        subset, _, split = rest.partition(":")  # a slice, such as train[:1000], has a colon, too
        return hub_rows(name, columns=columns, subset=subset or None, split=split or None)
    if file.is_dir():
        return folder_rows(file, columns=columns)
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
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{where} is not valid JSON ({error}): {_shown(line)}; write one object per line."
            ) from None
        yield where, row


def _from_function(function: Any, *, where: str) -> list[Task]:
    if not callable(function):
        raise ConfigError(
            f"{where} is {_shown(function)}, not a function; name one that returns a list of tasks."
        )
    try:
        rows = function()
        if isinstance(rows, Iterator):  # the code of a generator runs only now
            rows = list(rows)
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


def _task(row: Any, *, where: str, columns: Mapping[str, str] | None = None) -> Task:
    if isinstance(row, Task):
        prompt, further = row.prompt, dict(row.columns)
    elif isinstance(row, Mapping):
        if columns is None:
            columns = {name: name for name in ("prompt", *row)}
            if "prompt" not in row and MESSAGES in row:
                columns = {**columns, "prompt": MESSAGES}
                del columns[MESSAGES]
        for name, source in columns.items():
            if source not in row:
                raise ConfigError(
                    f"{where} has no {source!r}, only {_shown(list(row))}; every task needs one"
                    f"{': a text, or a list of messages' if name == 'prompt' else ''}."
                )
        further = {name: row[source] for name, source in columns.items()}
        prompt = further.pop("prompt")
    else:
        raise ConfigError(
            f"{where} is {_shown(row)}; a task is an object with a 'prompt' and any columns."
        )
    _check_prompt(prompt, where=where)
    _check_columns(further, where=where)
    return Task(prompt=prompt, columns=further)


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
                isinstance(message.get(key), str)
                for key in ("role", *(() if message.get("tool_calls") else ("content",)))
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
        if not isinstance(name, str):
            raise ConfigError(f"{where} has a column {_shown(name)}; column names must be texts.")
        if (problem := _problem(value)) is not None:
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
    return shortened(repr(value), 80)


def folder_rows(folder: Path, *, columns: Sequence[str] | None) -> Rows:
    """Read a folder written by `save_to_disk`, or all Parquet files in it in name order."""
    if any((folder / name).is_file() for name in SAVED):
        datasets = _datasets(f"Task folder {str(folder)!r}")
        try:
            loaded = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"Task folder {str(folder)!r} cannot be read: {error}.") from error
        return _dataset_rows(loaded, columns=columns, where=str(folder), example=f"{folder}/SPLIT")
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"Task folder {str(folder)!r} holds neither Parquet files nor a dataset that"
            " save_to_disk wrote; check the path."
        )
    return (row for file in files for row in parquet_rows(file, columns=columns))


def parquet_rows(path: Path, *, columns: Sequence[str] | None) -> Rows:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"Task file {str(path)!r} needs pyarrow, {_EXTRA}.") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_found(columns, file.schema_arrow.names, where=str(path))
            batches = file.iter_batches(columns=columns)
            for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                yield f"{path}, row {number}", row
    except FileNotFoundError:
        raise ConfigError(f"No task file {str(path)!r}; check the path.") from None
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"Task file {str(path)!r} cannot be read: {error}.") from None


def hub_rows(
    name: str, *, columns: Sequence[str] | None, subset: str | None, split: str | None
) -> Rows:
    """Read a dataset of the hub, or its cached copy."""
    datasets = _datasets(f"Dataset {name!r}")
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"Dataset {name!r} cannot be loaded from the hub ({type(error).__name__}: {words});"
            " check its name, subset and split, and the network, or save it to disk where there is"
            " one."
        ) from error
    example = f"hub:{name}:{subset or 'default'}:SPLIT"
    return _dataset_rows(loaded, columns=columns, where=name, example=example)


def _dataset_rows(loaded: Any, *, columns: Sequence[str] | None, where: str, example: str) -> Rows:
    """Read a dataset without splits, or with one."""
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            raise ConfigError(
                f"{where!r} has the splits {', '.join(loaded)}; add one to the path: {example!r}."
            )
        (loaded,) = loaded.values()
    _check_found(columns, loaded.column_names, where=where)
    dataset = loaded if columns is None else loaded.select_columns(list(columns))
    for number, row in enumerate(dataset):
        yield f"{where}, row {number}", row


def _check_found(wanted: Sequence[str] | None, found: Sequence[str], *, where: str) -> None:
    for name in wanted or ():
        if name not in found:
            raise ConfigError(
                f"{where} has no column {name!r}, only {', '.join(found)}; set columns to some of"
                " these."
            )


def _datasets(what: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"{what} needs datasets, {_EXTRA}.") from None
    return datasets


@plugin
class Puzzles:
    """Tasks of a reasoning_gym dataset; the scorer "reasoning_gym" verifies their answers."""

    __name__ = "reasoning_gym"

    dataset: NonEmptyStr  # name of the dataset in reasoning_gym, such as "leg_counting"
    size: PositiveInt = 500  # number of tasks
    seed: int = 0  # seed of the dataset
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # such as {max_animals = 4}
    system: str = "default"
    """System message that asks for tags: a name of reasoning_gym, or a text; "" = none."""
    chat: bool = True  # a list of messages; if false, a text that begins with `system`

    def __call__(self) -> list[Task]:
        config = {**self.config, "size": self.size, "seed": self.seed}
        dataset = make_dataset(self.dataset, config)
        return [
            Task(
                prompt=self._prompt(entry["question"]),
                columns={"answer": entry["answer"], COLUMN: puzzle_of(self.dataset, config, entry)},
            )
            for entry in (dataset[index] for index in range(self.size))
        ]

    def _prompt(self, question: str) -> Prompt:
        system = reasoning_gym("utils").SYSTEM_PROMPTS.get(self.system, self.system)
        if not self.chat:
            return f"{system}\n{question}" if system else question
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": question}]


GENERATORS: dict[str, type] = {"reasoning_gym": Puzzles}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskList:
    name: str  # "" for a single source
    weight: float
    tasks: list[Task]


def load_sources(settings: TasksConfig, given: Sequence[Any] | None) -> list[TaskList]:
    """Load the tasks of a run, by source; `given` are tasks passed to train()."""
    if not settings.source:
        if not (tasks := load_section(settings, given, section="tasks")):
            raise ConfigError("There are no tasks; set tasks.path, or pass tasks=[...] to train().")
        return [TaskList(name="", weight=1.0, tasks=tasks)]
    if given is not None:
        raise ConfigError("Tasks come both from Python and from [tasks.source]; keep one.")
    sources: list[TaskList] = []
    for name, row in settings.source.items():
        tasks = [replace(task, source=name) for task in _load(row, section=f"tasks.source.{name}")]
        sources.append(TaskList(name=name, weight=row.weight, tasks=tasks))
    return sources


def make_stream(sources: Sequence[TaskList], settings: TasksConfig, *, seed: int) -> TaskStream:
    """Order each source, then mix the sources by weight."""

    def ordered(tasks: Sequence[Task]) -> TaskStream:
        if settings.order != "curriculum":
            return Epochs(tasks, seed=seed, shuffle=settings.order == "shuffle")
        return Curriculum(tasks, seed=seed)

    if len(sources) == 1:
        return ordered(sources[0].tasks)
    streams = {source.name: ordered(source.tasks) for source in sources}
    return Mixture(streams, weights=[source.weight for source in sources])


def load_section(place: TaskPlace, given: Sequence[Any] | None, *, section: str) -> list[Task]:
    if given is None:
        return _load(place, section=section) if place.is_named else []
    if place.is_named:
        named = place.path or place.generator
        raise ConfigError(f"Tasks come both from Python and from {section} = {named!r}; keep one.")
    return load_tasks(given)


def _load(place: TaskPlace, *, section: str) -> list[Task]:
    if place.path is not None:
        return load_path(place.path, columns=place.columns)
    assert place.generator is not None, "checked with the config"
    generator = build_plugin(
        place.generator, builtins=GENERATORS, default="", section=f"{section}.generator"
    )
    return load_tasks(generator)
