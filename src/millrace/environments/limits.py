"""Limits and rules of episodes: turns, time, tools, and what happens at a limit."""

from dataclasses import dataclass, field, fields

from millrace.config import EnvironmentConfig
from millrace.core.records import Ending
from millrace.environments.conversation import History
from millrace.environments.tools.calls import ToolFormatName

SCORED_ENDINGS = ("turns", "length")  # limits at which adapters still score an episode


class EpisodeOver(Exception):
    """The episode reached a limit. An environment may catch this to return a reward."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended: {ending}")
        self.ending: Ending = ending


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    max_turns: int = 32  # all agents together
    episode_timeout_s: float | None = None
    turn_timeout_s: float | None = None
    tool_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """How episodes of a run are played."""

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    redundancy: int = 0  # extra episodes per training group; the slowest are cancelled
    ended_reward: float = 0.0  # reward of an episode that reached a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    records: bool = False  # keep recordings, so that episodes can be replayed


def rules_of(
    settings: EnvironmentConfig, *, redundancy: int, records: bool = False
) -> EpisodeRules:
    limits = settings.model_dump(include={row.name for row in fields(EpisodeLimits)})
    rules = settings.model_dump(include={"ended_reward", "tool_format", "history"})
    return EpisodeRules(
        limits=EpisodeLimits(**limits), redundancy=redundancy, records=records, **rules
    )
