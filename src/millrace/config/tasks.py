"""[tasks] and [evaluate]: which tasks are trained, in which order, and which are held out.

Torch-free.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.config.sections import (
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)

HUB = "hub:"


class TaskPlace(Section):
    """Where tasks come from; all of its keys can stand in each table that names tasks."""

    path: str | None = None
    """JSONL file (one task a line: "prompt", a text or chat messages, and any further columns),
    Parquet file or folder of such, folder of a Hugging Face dataset, or "hub:NAME" of one; see
    docs/how-to/tasks.md."""
    function: str | None = None
    """Or "module:name" of a function that returns a list of such tasks."""
    generator: dict[str, Any] | None = None
    """Or a table of what makes them, such as {type = "reasoning_gym", dataset = "leg_counting"};
    see docs/how-to/tasks.md."""
    prompt: str = "prompt"
    """Of a path: the column that is the prompt."""
    columns: tuple[str, ...] | None = None
    """Of a path: which columns tasks have besides; by default all."""
    subset: str | None = None
    """Of a "hub:NAME": its subset, if it has several."""
    split: str | None = None
    """Of a Hugging Face dataset: its split, if it has several; on the hub also a part of one, such
    as "train[:1000]"."""

    @property
    def is_named(self) -> bool:
        return any(place is not None for place in (self.path, self.function, self.generator))

    @property
    def own_name(self) -> str:
        """For metrics, if no other is given."""
        if self.path is not None:
            return Path(self.path.removeprefix(HUB)).stem
        place = self.function or str((self.generator or {}).get("type", ""))
        return place.rpartition(":")[2]

    def check(self, section: str) -> None:
        """Raise ValueError unless it is at most one place, and its keys belong to it."""
        named = [key for key in ("path", "function", "generator") if getattr(self, key) is not None]
        if len(named) > 1:
            keys = " and ".join(f"{section}.{key}" for key in named)
            raise ValueError(f"{keys} are both set; keep one")
        for key in ("prompt", "columns", "subset", "split"):
            value = getattr(self, key)
            if self.path is None and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{section}.{key} = {value!r} is for a path, and there is none; leave it out"
                )


class TaskSourceConfig(TaskPlace):
    weight: PositiveFloat = 1.0
    """Its share of all groups, beside the weights of the other sources."""
    name: str | None = None
    """Name in metrics; that of the file, dataset, function or generator if not given."""


class TasksConfig(TaskPlace):
    source: tuple[TaskSourceConfig, ...] = ()
    """Or several sources at once, mixed by their weights; see
    docs/how-to/shape-training-data.md."""
    order: Literal["shuffle", "sequential", "curriculum"] = "shuffle"
    """"shuffle" = a new order each epoch, fixed by the seed; "sequential" = as they come;
    "curriculum" = those whose recent solve rate is near target_solve_rate more often."""
    target_solve_rate: Share = 0.5
    """Of "curriculum"."""
    explore_share: Annotated[Float, Field(gt=0, le=1)] = 0.25
    """With "curriculum", the share of groups that go through all tasks in turn, so that none is
    forgotten."""


class EvaluateConfig(TaskPlace):
    every_steps: NonNegativeInt = 0
    """Besides before the first and after the last step; 0 = only then."""
    solved_at: Float = 1.0
    """An episode counts as solved when its score reaches this."""
    max_tasks: PositiveInt = 256
    samples: PositiveInt = 1
    """Episodes per task, for mean@k and pass@k."""
    temperature: NonNegativeFloat | None = None
    """0 = greedy; by default that for one sample, and sampling.temperature for several."""
    engines: NonNegativeInt = 0
    """Further engine processes that only evaluate, each time with exactly one version; 0 = the
    engines of the rollouts do it, with whatever versions they hold meanwhile."""
    score_timeout_s: PositiveFloat = 600.0
    """So long without any score, then tasks that still wait for theirs are counted as unscored."""
