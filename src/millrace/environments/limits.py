"""Limits of episodes: turns, time and tools."""

from dataclasses import dataclass

from millrace.core.records import Ending

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
