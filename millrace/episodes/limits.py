"""What an episode may use, and what its environment is told when it has used it up."""

from dataclasses import dataclass

from millrace.core.records import Ending


class EpisodeOver(Exception):
    """The episode has come to a limit. An environment may let it pass, or catch it to return a
    reward."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"the episode has ended: {ending}")
        self.ending: Ending = ending


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    max_turns: int = 32  # of all agents together
    episode_timeout_s: float | None = None
    turn_timeout_s: float | None = None
    tool_timeout_s: float = 30.0
    tool_result_chars: int = 16384
