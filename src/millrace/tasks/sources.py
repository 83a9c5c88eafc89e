"""Builds the task stream of a run from the [tasks] settings: load, order and mix the sources.

A generator is a plug-in behind [tasks.generator]. Its fields are the keys of the table. It is
called without arguments and returns rows; a user's factory may also return the rows themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.config import TaskPlace, TasksConfig
from millrace.config.section import NonEmptyStr, PositiveInt
from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin, plugin
from millrace.core.records import Prompt, Task
from millrace.scoring.verifiers.reasoning_gym import COLUMN, make_dataset, puzzle_of, reasoning_gym
from millrace.tasks.loading import load_path, load_tasks
from millrace.tasks.streams import Curriculum, Epochs, Mixture, TaskStream


@plugin
class Puzzles:
    """Tasks of a reasoning_gym dataset; the scorer "reasoning_gym" verifies their answers."""

    __name__ = "reasoning_gym"

    dataset: NonEmptyStr
    """Name of the dataset in reasoning_gym, such as "leg_counting"."""
    size: PositiveInt = 500
    """Number of tasks."""
    seed: int = 0
    """Seed of the dataset."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the dataset, such as {max_animals = 4}."""
    system: str = "default"
    """System message that asks for the answer in tags: a name of reasoning_gym, or a text; "" for
    none."""
    chat: bool = True
    """Whether the prompt is a list of messages; if false, a text that begins with `system`."""

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
