"""What an episode may use, and what its environment is told when it has used it up.

How episodes of a run are played and when they end.
"""

from dataclasses import dataclass, field

from millrace.config import EnvironmentConfig
from millrace.core.records import Ending
from millrace.environments.conversation import History
from millrace.environments.tools.calls import ToolFormatName


class EpisodeOver(Exception):
    """The episode has come to a limit. An environment may let it pass, or catch it to return a
    reward."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended: {ending}")
        self.ending: Ending = ending


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    max_turns: int = 32  # of all agents together
    episode_timeout_s: float | None = None
    turn_timeout_s: float | None = None
    tool_timeout_s: float = 30.0
    tool_result_chars: int = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """How episodes are played and when they end."""

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    redundancy: int = 0  # further episodes of a group in training, of which the last are given up
    ended_reward: float = 0.0  # of an episode that came to a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    records: bool = False  # what happened is kept, so that it can be replayed


def rules_of(
    settings: EnvironmentConfig, *, redundancy: int, records: bool = False
) -> EpisodeRules:
    return EpisodeRules(
        limits=EpisodeLimits(
            max_turns=settings.max_turns,
            episode_timeout_s=settings.episode_timeout_s,
            turn_timeout_s=settings.turn_timeout_s,
            tool_timeout_s=settings.tool_timeout_s,
            tool_result_chars=settings.tool_result_chars,
        ),
        redundancy=redundancy,
        ended_reward=settings.ended_reward,
        tool_format=settings.tool_format,
        history=settings.history,
        records=records,
    )
