"""Puzzles of the reasoning-gym package: its datasets, and its own judgement of answers.

An entry of a dataset has values that only Python knows, such as tuples, and some datasets cannot be
made again in another process. So an entry travels with its task, written as a Python literal.
"""

import ast
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import Prompt
from millrace.scoring.verifiers.answers import judge_each

COLUMN = "puzzle"  # of a task: dataset, config and entry, as told_of() gives them


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGym:
    """What the dataset of the task gives for the answer: 1 if it is right, mostly; some give less
    than 1 for what is nearly right."""

    __name__ = "reasoning_gym"

    tag: str = "answer"
    """The answer is what the last <answer>...</answer> holds; without one the score is 0. "" =
    all of the completion."""

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str):
            raise ValueError(f"tag = {self.tag!r} must be a text")
        reasoning_gym()

    @property
    def needed_columns(self) -> tuple[str, ...]:
        return (COLUMN,)

    def __call__(self, completions: Sequence[Prompt], **columns: Any) -> list[float | None]:
        return judge_each(self._judge, completions, columns[COLUMN])

    def _judge(self, text: str, puzzle: Mapping[str, Any]) -> float:
        extract_answer = reasoning_gym("utils").extract_answer
        answer = extract_answer(text, tag_name=self.tag) if self.tag else text.strip()
        if answer is None:
            return 0.0
        dataset = _dataset(puzzle["dataset"], json.dumps(puzzle["config"], sort_keys=True))
        entry = ast.literal_eval(puzzle["entry"])
        try:
            return float(dataset.score_answer(answer, entry=entry))
        except (ValueError, TypeError, ArithmeticError, LookupError, SyntaxError):
            # Datasets parse answers without fear; what one stumbles over is not right.
            return 0.0


def told_of(name: str, config: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a task's column COLUMN holds about its entry."""
    written = repr(_plain(entry))
    try:
        ast.literal_eval(written)
    except ValueError as error:
        raise ConfigError(
            f"Dataset {name!r} of reasoning_gym has an entry that cannot be written down"
            f" ({error}); choose another dataset."
        ) from None
    return {"dataset": name, "config": dict(config), "entry": written}


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """One of reasoning_gym's datasets; raises ConfigError."""
    factory = reasoning_gym("factory")
    if name not in factory.DATASETS:
        known = ", ".join(sorted(factory.DATASETS))
        raise ConfigError(f"Dataset {name!r} is not one of reasoning_gym's; there are {known}.")
    try:
        return factory.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Dataset {name!r} of reasoning_gym does not take {dict(config)!r}: {error}."
        ) from None


def reasoning_gym(module: str = "") -> Any:
    """The package, or a module of it."""
    try:
        return importlib.import_module(f"reasoning_gym.{module}".rstrip("."))
    except ImportError:
        raise ConfigError(
            "Puzzles of reasoning_gym need that package, which is not installed; install"
            " millrace[reasoning-gym]."
        ) from None


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    return make_dataset(name, json.loads(config))


def _plain(value: Any) -> Any:
    """Without numpy's scalars and arrays."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(row) for key, row in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_plain(row) for row in value])
    return value
