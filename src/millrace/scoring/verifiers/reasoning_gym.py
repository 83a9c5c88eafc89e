"""The verifier "reasoning_gym": puzzles of the reasoning-gym package, scored by their datasets.

A dataset entry has Python values such as tuples, and some datasets cannot be recreated in another
process. So each entry travels with its task, written as a Python literal.
"""

import ast
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.plugins import plugin
from millrace.scoring.verifiers.answers import ColumnVerifier

COLUMN = "puzzle"  # task column with dataset, config and entry, see puzzle_of()


@plugin
class ReasoningGym(ColumnVerifier):
    """The score of the answer in the task's dataset. Some datasets give partial scores."""

    __name__ = "reasoning_gym"
    column = COLUMN

    tag: str = "answer"
    """Tag around the answer; the last one counts, and none scores 0. "" = the whole text."""

    def __post_init__(self) -> None:
        reasoning_gym()

    def _score(self, text: str, reference: Mapping[str, Any]) -> float:
        extract_answer = reasoning_gym("utils").extract_answer
        answer = extract_answer(text, tag_name=self.tag) if self.tag else text.strip()
        if answer is None:
            return 0.0
        dataset = _dataset(reference["dataset"], json.dumps(reference["config"], sort_keys=True))
        entry = ast.literal_eval(reference["entry"])
        try:
            return float(dataset.score_answer(answer, entry=entry))
        except (ValueError, TypeError, ArithmeticError, LookupError, SyntaxError):
            # Datasets do not guard their parsers: an answer that makes one raise is wrong.
            return 0.0


def puzzle_of(name: str, config: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of the task column COLUMN for an entry; raises ConfigError."""
    written = repr(_plain(entry))
    try:
        ast.literal_eval(written)
    except ValueError as error:
        raise ConfigError(
            f"Dataset {name!r} of reasoning_gym has an entry that is not a Python literal"
            f" ({error}); choose another dataset."
        ) from None
    return {"dataset": name, "config": dict(config), "entry": written}


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    factory = reasoning_gym("factory")
    if name not in factory.DATASETS:
        known = ", ".join(sorted(factory.DATASETS))
        raise ConfigError(f"reasoning_gym has no dataset {name!r}; the datasets are: {known}.")
    try:
        return factory.create_dataset(name, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Dataset {name!r} of reasoning_gym does not accept {dict(config)!r}: {error}."
        ) from None


def reasoning_gym(module: str = "") -> Any:
    """Import the package, or one of its modules."""
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
    """Replace numpy's scalars and arrays with plain Python values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(row) for key, row in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_plain(row) for row in value])
    return value
