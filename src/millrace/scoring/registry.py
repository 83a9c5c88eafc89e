"""Turns [[scorers]] tables and Python functions into scorers.

A new built-in type is one module with a dataclass (see scorer_type.py) and one line in
SCORER_TYPES. A user's own type needs no registration: `type = "module:Name"` names a class. If the
class has the methods of a ScorerType, it is one; otherwise it is a reward function.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.config import ScorerConfig
from millrace.core.errors import ConfigError
from millrace.core.files import check_file_name
from millrace.core.plugins import build_plugin
from millrace.core.records import Task
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.reward_models.reward_model import ProcessRewardModel, RewardModel
from millrace.scoring.scheduling.scorer_queue import ScoreGate, check_gates, parse_gate
from millrace.scoring.scorer_type import ScorerType
from millrace.scoring.services.endpoint import Http
from millrace.scoring.services.judge import Judge
from millrace.scoring.teachers.teacher import Reference, SelfTeacher, Teacher
from millrace.scoring.verifiers import VERIFIERS

SCORER_TYPES: dict[str, type] = {
    "http": Http,
    "judge": Judge,
    "reward_model": RewardModel,
    "process_reward_model": ProcessRewardModel,
    "teacher": Teacher,
    "self_teacher": SelfTeacher,
    "reference": Reference,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """One scorer of a run: its type, and the settings that all scorers have."""

    type: ScorerType
    name: str
    weight: float = 1.0
    gate: ScoreGate | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of CallSettings

    @property
    def may_reward_tokens(self) -> bool:
        """True if the scorer may return token rewards. A user's own type always may."""
        known = (Function, *SCORER_TYPES.values(), *VERIFIERS.values())
        return isinstance(self.type, ProcessRewardModel) or not isinstance(self.type, known)


def resolve_scorers(rows: Sequence[ScorerConfig]) -> list[ScorerSpec]:
    return [resolve_scorer(row, section=f"scorers.{i}") for i, row in enumerate(rows)]


def resolve_scorer(row: ScorerConfig, *, section: str) -> ScorerSpec:
    if row.function is not None:
        scorer_type: ScorerType = Function(function=row.function)
    else:
        types = {**VERIFIERS, **SCORER_TYPES}
        built = build_plugin(row.type_settings, builtins=types, default="", section=section)
        scorer_type = built if isinstance(built, ScorerType) else Function(function=built)
    return ScorerSpec(
        type=scorer_type,
        name=row.name or scorer_type.default_name,
        weight=row.weight,
        gate=None if row.when is None else parse_gate(row.when, section=section),
        overrides=row.call_settings,
    )


def function_scorer(function: str | Callable[..., Any], *, name: str | None = None) -> ScorerSpec:
    """The scorer for a reward function that is passed to train() or named on the command line."""
    scorer_type = Function(function=function)
    return ScorerSpec(type=scorer_type, name=name or scorer_type.default_name)


def check_scorers(
    specs: Sequence[ScorerSpec], tasks: Sequence[Task], *, may_be_empty: bool = False
) -> None:
    """Raise ConfigError for mistakes. `may_be_empty`: the environment gives the rewards."""
    names = [spec.name for spec in specs]
    if not names and not may_be_empty:
        raise ConfigError(
            "The run has no scorer; add a [[scorers]] table, or pass scorers=[...] to train()."
        )
    for name in names:
        check_file_name(name, of="A scorer")
        if names.count(name) > 1:
            raise ConfigError(f"Two scorers are named {name!r}; give each a different name.")
    check_gates({spec.name: spec.gate for spec in specs})
    for spec in specs:
        spec.type.check(tasks, name=spec.name)
