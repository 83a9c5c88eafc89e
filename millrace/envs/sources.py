"""From [tasks] to the stream of a run: the sources are loaded, put in order, and mixed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.config import EvaluateConfig, TasksConfig
from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.envs.curriculum import Curriculum
from millrace.envs.streams import Epochs, Mixture, Source, TaskStream
from millrace.envs.tasks import load_tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskList:
    name: str  # "" if it is the only one
    weight: float
    tasks: list[Task]


def load_sources(settings: TasksConfig, given: Sequence[Any] | None) -> list[TaskList]:
    """The tasks of a run, by source; `given` are those that came from Python."""
    if not settings.source:
        if not (tasks := load_section(settings, given, section="tasks")):
            raise ConfigError("There are no tasks; set tasks.path, or pass tasks=[...] to train().")
        return [TaskList(name="", weight=1.0, tasks=tasks)]
    if given is not None:
        raise ConfigError("Tasks come both from Python and from [[tasks.source]]; keep one.")
    sources: list[TaskList] = []
    for row in settings.source:
        place = row.path or row.function
        assert place is not None, "checked with the config"
        name = row.name or (Path(row.path).stem if row.path else place.rpartition(":")[2])
        if name in {source.name for source in sources}:
            raise ConfigError(f"Two of [[tasks.source]] are named {name!r}; give one another name.")
        tasks = [replace(task, source=name) for task in load_tasks(place)]
        sources.append(TaskList(name=name, weight=row.weight, tasks=tasks))
    return sources


def make_stream(sources: Sequence[TaskList], settings: TasksConfig, *, seed: int) -> TaskStream:
    """Each source in its order, and all of them mixed by their weights."""

    def ordered(tasks: Sequence[Task]) -> TaskStream:
        if settings.order != "curriculum":
            return Epochs(tasks, seed=seed, shuffle=settings.order == "shuffle")
        return Curriculum(
            tasks,
            seed=seed,
            target=settings.target_solve_rate,
            explore_share=settings.explore_share,
        )

    streams = [ordered(source.tasks) for source in sources]
    if len(streams) == 1:
        return streams[0]
    return Mixture(
        [
            Source(stream=stream, weight=source.weight, name=source.name)
            for stream, source in zip(streams, sources, strict=True)
        ]
    )


def load_section(
    settings: TasksConfig | EvaluateConfig, given: Sequence[Any] | None, *, section: str
) -> list[Task]:
    source = settings.path or settings.function
    if given is not None and source is not None:
        raise ConfigError(f"Tasks come both from Python and from {section} = {source!r}; keep one.")
    if given is not None:
        return load_tasks(given)
    return load_tasks(source) if source is not None else []
