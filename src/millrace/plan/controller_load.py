"""How busy the one controller of a run would be: what its messages and its journal cost.

The seconds are those of `python benchmarks/controller_costs.py` in docs/how-to/plan.md, on one
2.5 GHz Xeon core. Scoring, users' environments and packing are left out.
"""

from millrace.config import RunConfig
from millrace.plan.lengths import Lengths
from millrace.plan.simulation import Prediction

# By tokens of a completion: of a request with its completion, and of the journal of 8 of them.
_MESSAGE_S = {512: 33e-6, 8192: 40e-6}
_JOURNAL_S = {512: 2.5e-3 / 8, 8192: 7.7e-3 / 8}
_REMOTE_TURN_S = 1.2e-3  # of a turn in an environment worker (docs/how-to/environments.md)


def controller_busy(config: RunConfig, lengths: Lengths, found: Prediction) -> float:
    """The cores that the controller needs. It is one Python process, so above 1 it limits the
    run."""
    message_s, message_token_s = _line(_MESSAGE_S)
    journal_s, journal_token_s = _line(_JOURNAL_S) if config.journal.is_on else (0.0, 0.0)
    if config.environment.workers + config.environment.remote > 0:
        message_s += _REMOTE_TURN_S
    per_sample_s = lengths.mean_turns * message_s + journal_s
    per_token_s = message_token_s + journal_token_s
    return found.samples_per_s * per_sample_s + found.tokens_per_s * per_token_s


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """Seconds of a completion without tokens, and of each token."""
    (few, short_s), (many, long_s) = seconds.items()
    per_token_s = (long_s - short_s) / (many - few)
    return short_s - few * per_token_s, per_token_s
