"""Settings of [tasks] and [evaluate]: training tasks, their order, and held-out tasks.

Torch-free.
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, field_validator

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


def _columns(value: Any) -> Any:
    if isinstance(value, list | tuple):
        names = cast(list[Any], value)
        value = {name: name for name in names if isinstance(name, str)}
        if len(value) < len(names):
            raise ValueError("a list of columns holds different texts")
    return {"prompt": "prompt", **cast(dict[Any, Any], value)} if isinstance(value, dict) else value


class TaskPlace(Section):
    """Where tasks come from: keys of every table that names tasks."""

    path: str | None = None
    """Path of the tasks: a JSONL file (one task per line: "prompt", a text or chat messages, and
    further columns), a Parquet file or a folder of them, a folder of a Hugging Face dataset, or
    "hub:NAME:SUBSET:SPLIT" with a dataset on the hub, such as "hub:openai/gsm8k:main:train"; see
    docs/how-to/tasks.md."""
    generator: Plugin | None = None
    """Source of tasks instead of a path: a function that returns a list of tasks, as "module:name"
    or "file.py:name", or a table such as {type = "reasoning_gym", dataset = "leg_counting"}; see
    docs/how-to/tasks.md."""
    columns: Annotated[dict[str, str] | None, BeforeValidator(_columns)] = None
    """Columns of a task, and the columns of the path that hold them, such as {prompt = "question",
    answer = "answer"}; others are not read. A list names columns besides "prompt" that keep their
    names. By default all columns are kept."""

    @property
    def is_named(self) -> bool:
        return self.path is not None or self.generator is not None


class TaskSourceConfig(TaskPlace):
    weight: PositiveFloat = 1.0
    """Weight of the source, above 0. Its share of all groups is its weight over the sum of all
    weights."""


class TasksConfig(TaskPlace):
    source: dict[str, TaskSourceConfig] = Field(default={})
    """Several sources, by their names in metrics, that are mixed by their weights, instead of one
    path or generator; see docs/how-to/shape-training-data.md."""
    order: Literal["shuffle", "sequential", "curriculum"] = "shuffle"
    """Order of tasks: "shuffle" = a new order each epoch, fixed by the seed; "sequential" = as
    given; "curriculum" = tasks whose recent solve rate is near a half more often."""

    epochs: PositiveFloat | None = None
    """Number of passes over the examples of `millrace sft`, above 0; it replaces trainer.steps.
    `millrace train` refuses it."""

    @field_validator("source", mode="before")
    @classmethod
    def _sources_have_names(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError(
                "sources are tables by name; write [tasks.source.NAME] instead of [[tasks.source]]"
            )
        return value


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
