"""Builds the task stream of a run from the [tasks] settings: load, order and mix the sources."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.config import TaskPlace, TasksConfig
from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.tasks.curriculum import Curriculum
from millrace.tasks.generators import build_generator
from millrace.tasks.loading import load_path, load_tasks
from millrace.tasks.streams import Epochs, Mixture, Source, TaskStream


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

    streams = [ordered(source.tasks) for source in sources]
    if len(streams) == 1:
        return streams[0]
    return Mixture(
        [
            Source(stream=stream, weight=source.weight, name=source.name)
            for stream, source in zip(streams, sources, strict=True)
        ]
    )


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
    return load_tasks(build_generator(place.generator, section=f"{section}.generator"))
