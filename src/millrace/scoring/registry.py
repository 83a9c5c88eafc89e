"""The one place where a [[scorer]] table becomes a scorer.

A new kind is one module with a dataclass (see scorer_kind.py) and one line in KINDS. A user's own,
`type = "module:Name"`, needs not even that: it is a kind if it has the methods of one, and a reward
function otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.config import ScorerConfig
from millrace.core.errors import ConfigError
from millrace.core.files import check_file_name
from millrace.core.plugins import build_plugin
from millrace.core.protocols import Scorer
from millrace.core.records import Task
from millrace.scoring.functions.scorer import Function
from millrace.scoring.reward_models.process_reward_model import ProcessRewardModel
from millrace.scoring.reward_models.reward_model import RewardModel
from millrace.scoring.scheduling.gates import ScoreGate, check_gates, parse_gate
from millrace.scoring.scorer_kind import CallRules, ScorerKind, ScorerTools
from millrace.scoring.services.http_scorer import Http
from millrace.scoring.services.judge import Judge
from millrace.scoring.teachers.kinds import Reference, SelfTeacher, Teacher
from millrace.scoring.verifiers import VERIFIERS

KINDS: dict[str, type] = {
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
    """One scorer of a run: what it is, and what every scorer has."""

    kind: ScorerKind
    name: str
    weight: float = 1.0
    gate: ScoreGate | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of CallRules

    def rules(self, *, num_workers: int) -> CallRules:
        return replace(self.kind.rules(num_workers=num_workers), **self.settings)

    def make(self, tools: ScorerTools, *, rules: CallRules) -> Scorer:
        return self.kind.make(name=self.name, weight=self.weight, rules=rules, tools=tools)


def spec_of(row: ScorerConfig, *, section: str) -> ScorerSpec:
    """What a [[scorer]] table describes; raises ConfigError."""
    kind = (
        Function(function=row.function)
        if row.function is not None
        else _kind_of(row.own, section=section)
    )
    return ScorerSpec(
        kind=kind,
        name=row.name or kind.default_name,
        weight=row.weight,
        gate=None if row.when is None else parse_gate(row.when, section=section),
        settings=row.rules,
    )


def spec_of_function(function: str | Callable[..., Any], *, name: str | None = None) -> ScorerSpec:
    kind = Function(function=function)
    return ScorerSpec(kind=kind, name=name or kind.default_name)


def may_reward_tokens(kind: ScorerKind) -> bool:
    """Whether it may say something about single tokens, as far as that can be known: a user's own
    may."""
    known = (Function, *KINDS.values(), *VERIFIERS.values())
    return isinstance(kind, ProcessRewardModel) or not isinstance(kind, known)


def check_specs(
    specs: Sequence[ScorerSpec], tasks: Sequence[Task], *, may_be_none: bool = False
) -> None:
    """Raise ConfigError for what can be known to be wrong before any worker starts. There
    `may_be_none` where an environment rewards."""
    names = [spec.name for spec in specs]
    if not names and not may_be_none:
        raise ConfigError(
            "There is no scorer; add a [[scorer]] table, or pass scorers=[...] to train()."
        )
    for name in names:
        check_file_name(name, of="A scorer")
        if names.count(name) > 1:
            raise ConfigError(f"Two scorers are named {name!r}; give each a name of its own.")
    check_gates({spec.name: spec.gate for spec in specs})
    for spec in specs:
        spec.kind.check(tasks, name=spec.name)


def _kind_of(table: Mapping[str, Any], *, section: str) -> ScorerKind:
    builtins = {**VERIFIERS, **KINDS}
    built = build_plugin(table, builtins=builtins, default="", section=section)
    return built if isinstance(built, ScorerKind) else Function(function=built)
