"""A scripted scorer, and groups for it."""

import asyncio
from collections.abc import Callable

from millrace.core.records import Episode, Group, ScorerResult, Task, Turn


def episode(text: str) -> Episode:
    return Episode(turns=(Turn(prompt="p", completion=text, finish="stop"),), rollouts=())


def text_of(episode: Episode) -> str:
    return episode.turns[-1].completion


def group(*texts: str, number: int = 0) -> Group:
    return Group(number=number, task=Task(prompt="p"), episodes=tuple(map(episode, texts)))


class ScriptedScorer:
    """Scores an episode by the length of its text, once `let` allows it."""

    def __init__(self, name: str = "scripted", *, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.calls: list[list[str]] = []  # texts of each call
        self.let = asyncio.Event()
        self.let.set()
        self.fails: Callable[[Group], Exception | None] = lambda group: None
        self.num_cancelled = 0

    async def score(self, group: Group) -> list[ScorerResult]:
        self.calls.append([text_of(episode) for episode in group.episodes])
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if (error := self.fails(group)) is not None:
            raise error
        return [ScorerResult(score=float(len(text_of(episode)))) for episode in group.episodes]


async def settle() -> None:
    """Run the event loop until nothing more can happen."""
    for _ in range(30):
        await asyncio.sleep(0)
