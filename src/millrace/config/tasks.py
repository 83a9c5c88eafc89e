"""Settings of [tasks] and [evaluate]: training tasks, their order, and held-out tasks.

Torch-free.
"""

from pathlib import Path
from typing import Literal

from millrace.config.section import (
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    Plugin,
    PositiveFloat,
    PositiveInt,
    Section,
)

HUB = "hub:"


class TaskPlace(Section):
    """Where tasks come from: keys of every table that names tasks."""

    path: str | None = None
    """Path of the tasks: a JSONL file (one task per line: "prompt", a text or chat messages, and
    further columns), a Parquet file or a folder of them, a folder of a Hugging Face dataset, or
    "hub:NAME" or "hub:NAME:SUBSET"; see docs/how-to/tasks.md."""
    generator: Plugin | None = None
    """Source of tasks instead of a path: a function that returns a list of tasks, as "module:name"
    or "file.py:name", or a table such as {type = "reasoning_gym", dataset = "leg_counting"}; see
    docs/how-to/tasks.md."""
    prompt: str = "prompt"
    """Name of the column of a path that holds the prompt."""
    columns: tuple[str, ...] | None = None
    """Names of the further columns of a path that tasks keep. By default all of them."""
    split: str | None = None
    """Split of a Hugging Face dataset that has several; on the hub also a slice, such as
    "train[:1000]"."""

    @property
    def is_named(self) -> bool:
        return self.path is not None or self.generator is not None

    @property
    def own_name(self) -> str:
        """Default name in metrics."""
        if self.path is None:
            return str((self.generator or {}).get("type", "")).rpartition(":")[2]
        if self.path.startswith(HUB):
            name, _, subset = self.path.removeprefix(HUB).partition(":")
            return subset or Path(name).name
        return Path(self.path).stem


class TaskSourceConfig(TaskPlace):
    weight: PositiveFloat = 1.0
    """Weight of the source, above 0. Its share of all groups is its weight over the sum of all
    weights."""
    name: str | None = None
    """Name in metrics. By default that of the file, dataset or generator."""


class TasksConfig(TaskPlace):
    source: tuple[TaskSourceConfig, ...] = ()
    """Several sources that are mixed by their weights, instead of one path or generator; see
    docs/how-to/shape-training-data.md."""
    order: Literal["shuffle", "sequential", "curriculum"] = "shuffle"
    """Order of tasks: "shuffle" = a new order each epoch, fixed by the seed; "sequential" = as
    given; "curriculum" = tasks whose recent solve rate is near a half more often."""


class EvaluateConfig(TaskPlace):
    every_steps: NonNegativeInt = 0
    """Number of steps between evaluations. Held-out tasks are always evaluated before the first
    and after the last step; 0 = only then."""
    solved_at: Float = 1.0
    """Score at which an episode counts as solved."""
    max_tasks: PositiveInt = 256
    """Maximum number of held-out tasks that are evaluated: the first ones."""
    samples: PositiveInt = 1
    """Number of episodes per task, for mean@k and pass@k."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature of evaluations; 0 = greedy. By default 0 for one sample, and
    sampling.temperature for several."""
    engines: NonNegativeInt = 0
    """Number of additional engine processes that only evaluate, always with exactly one version.
    0 = the engines of the rollouts evaluate, with the versions they have at the time."""
