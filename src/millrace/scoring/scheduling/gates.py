"""Gates: a scorer that judges only what another one found good enough.

    when = "format >= 1"

Promise: names that lead nowhere, or in a circle, are refused before the run starts.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.records import Verdict

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*([^\s<>=!][^<>=!]*?)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreGate:
    scorer: str
    comparison: str
    limit: float

    def passes(self, verdict: Verdict) -> bool:
        """What was not scored does not pass."""
        if verdict.score is None:
            return False
        return COMPARISONS[self.comparison](verdict.score, self.limit)


def parse_gate(text: str, *, section: str) -> ScoreGate:
    found = CONDITION.fullmatch(text)
    limit = None if found is None else _number(found[3])
    if found is None or limit is None:
        raise ConfigError(
            f"Setting '{section}.when' = {text!r} is no condition; write the name of a scorer, one"
            f" of {' '.join(COMPARISONS)} and a number, as in 'format >= 1'."
        )
    return ScoreGate(scorer=found[1], comparison=found[2], limit=limit)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_gates(gates: Mapping[str, ScoreGate | None]) -> None:
    """`gates`: of each scorer by name. Raises ConfigError."""
    for name, gate in gates.items():
        if gate is not None and gate.scorer not in gates:
            raise ConfigError(
                f"Scorer {name!r} waits for {gate.scorer!r}, which is no scorer; there are:"
                f" {', '.join(gates)}."
            )
    for name in gates:
        path = [name]
        while (gate := gates[path[-1]]) is not None:
            if gate.scorer in path:
                circle = [*path[path.index(gate.scorer) :], gate.scorer]
                raise ConfigError(
                    f"Scorers wait for each other: {' for '.join(circle)}; leave out the `when` of"
                    " one of them."
                )
            path.append(gate.scorer)
