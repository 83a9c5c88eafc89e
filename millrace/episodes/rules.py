"""How episodes of a run are played and when they end."""

from dataclasses import dataclass, field

from millrace.config import EnvironmentConfig
from millrace.episodes.conversation import History
from millrace.episodes.limits import Limits
from millrace.episodes.tool_calls import ToolFormatName


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How episodes are played and when they end."""

    limits: Limits = field(default_factory=Limits)
    redundancy: int = 0  # further episodes of a group in training, of which the last are given up
    ended_reward: float = 0.0  # of an episode that came to a limit
    tool_format: ToolFormatName = "auto"
    history: History = "template"
    records: bool = False  # what happened is kept, so that it can be replayed


def rules_of(settings: EnvironmentConfig, *, redundancy: int, records: bool = False) -> Rules:
    return Rules(
        limits=Limits(
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
