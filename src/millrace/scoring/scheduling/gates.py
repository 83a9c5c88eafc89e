"""Gates: a scorer that runs only on episodes that another scorer rated well enough.

    when = "format >= 1"

Promise: unknown scorer names and cycles are refused before the run starts.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.records import ScorerResult

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

    def passes(self, result: ScorerResult) -> bool:
        """An episode without a score does not pass."""
        return result.score is not None and COMPARISONS[self.comparison](result.score, self.limit)


def parse_gate(text: str, *, section: str) -> ScoreGate:
    if (found := CONDITION.fullmatch(text)) is not None:
        with contextlib.suppress(ValueError):  # not a number
            return ScoreGate(scorer=found[1], comparison=found[2], limit=float(found[3]))
    raise ConfigError(
        f"Setting '{section}.when' = {text!r} is not a condition; write the name of a scorer, one"
        f" of {' '.join(COMPARISONS)} and a number, as in 'format >= 1'."
    )


def check_gates(gates: Mapping[str, ScoreGate | None]) -> None:
    """Raise ConfigError for unknown names and cycles. `gates` has every scorer's gate by name."""
    for name, gate in gates.items():
        if gate is not None and gate.scorer not in gates:
            raise ConfigError(
                f"Scorer {name!r} waits for {gate.scorer!r}, which is not a scorer; the scorers"
                f" are: {', '.join(gates)}."
            )
    for name in gates:
        path = [name]
        while (gate := gates[path[-1]]) is not None:
            if gate.scorer in path:
                cycle = [*path[path.index(gate.scorer) :], gate.scorer]
                raise ConfigError(
                    f"Scorers wait for each other: {' -> '.join(cycle)}; remove the `when` of one"
                    " of them."
                )
            path.append(gate.scorer)
