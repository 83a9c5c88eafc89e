"""The scoring of one group, from its first finished episode to its last verdict.

    scoring.listen(request)            while tokens are sampled, for scorers that begin with these
    scoring.add(index, episode)        as each finishes, while its siblings are still generating
    await scoring.verdicts(group)      once all have; a column per scorer

A scorer that takes single episodes is asked at once, one that compares a group when it is complete,
and one behind a gate when the scorer it waits for has spoken about the episode.
Runs on the controller's event loop: a task for each scorer and episode, ended by close().
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from millrace.core.protocols import OnTokens, Scorer, SegmentScorer
from millrace.core.records import CompletionChunk, Episode, Group, Request, Verdict
from millrace.scoring.scheduling.gates import ScoreGate
from millrace.scoring.scheduling.scorer_queue import ScorerQueue, ScoreTicket


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScorerStation:
    """A scorer's place among the others of a run."""

    desk: ScorerQueue
    gate: ScoreGate | None


class GroupScoring:
    def __init__(self, stations: Mapping[str, ScorerStation], *, ticket: ScoreTicket) -> None:
        """`stations`: by the name of the scorer."""
        self._stations = stations
        self._ticket = ticket
        self._episodes: dict[int, Episode] = {}
        # By scorer and episode; of a scorer that takes groups, by the first one of them.
        self._judging: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._found: defaultdict[tuple[str, int], asyncio.Future[Verdict]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """In the order of their columns."""
        return tuple(station.desk.scorer for station in self._stations.values())

    @property
    def takes_episodes(self) -> bool:
        """Some scorer begins with an episode while its siblings are still generating."""
        return any(not station.desk.takes_groups for station in self._stations.values())

    def add(self, index: int, episode: Episode) -> None:
        """This episode is finished. `index`: its number among those that were begun."""
        assert index not in self._episodes, f"episode {index} is finished once"
        self._episodes[index] = episode
        for name, station in self._stations.items():
            if not station.desk.takes_groups:
                self._judging[name, index] = self._judged(name, {index: episode})

    def listen(self, request: Request) -> OnTokens | None:
        """Hears what is sampled for one of its episodes. A scorer behind a gate does not: it may
        never be asked."""
        scorers = [s.desk.scorer for s in self._stations.values() if s.gate is None]
        listeners = [
            listener
            for scorer in scorers
            if isinstance(scorer, SegmentScorer)
            and (listener := scorer.listen(request, task=self._ticket.task)) is not None
        ]
        if not listeners:
            return None

        def tell(piece: CompletionChunk) -> None:
            for listener in listeners:
                listener(piece)

        return tell

    async def token_rewards(self, index: int) -> list[np.ndarray]:  # [L] for each rollout
        """What is said about single tokens of an episode that was added, while others are not.
        Raises what a scorer raises. One behind a gate is not asked: the gate may want the group."""
        rewards = [np.zeros(len(r.tokens), np.float32) for r in self._episodes[index].rollouts]
        for name, station in self._stations.items():
            if station.desk.takes_groups or station.gate is not None:
                continue
            # Shielded: whoever gives up waiting must not cancel what the group waits for, too.
            await asyncio.shield(self._judging[name, index])
            for total, notes in zip(rewards, self._found[name, index].result().notes, strict=False):
                if notes.rewards is not None:
                    total += station.desk.scorer.weight * notes.rewards
        return rewards

    async def verdicts(self, group: Group) -> list[list[Verdict]]:
        """A column per scorer, a verdict per episode. Raises what the first scorer that fails
        raises: the others need not go on then."""
        episodes = {self._place_of(episode): episode for episode in group.episodes}
        for name, station in self._stations.items():
            if station.desk.takes_groups:
                self._judging[name, min(episodes)] = self._judged(name, episodes)
        # Only these: one that the group did without is not worth waiting for.
        await asyncio.gather(*(task for (_, i), task in self._judging.items() if i in episodes))
        return [[self._found[name, i].result() for i in episodes] for name in self._stations]

    def _place_of(self, episode: Episode) -> int:
        """Where it was added; of more episodes than the group needed, some may be left out."""
        for index, added in self._episodes.items():
            if added is episode:
                return index
        index = max(self._episodes, default=-1) + 1
        self.add(index, episode)
        return index

    def close(self) -> None:
        """Nobody waits for what is still missing."""
        for task in self._judging.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # looked at, or asyncio warns that nobody did

    def _judged(self, name: str, episodes: Mapping[int, Episode]) -> asyncio.Task[None]:
        return asyncio.create_task(self._judge(name, episodes))

    async def _judge(self, name: str, episodes: Mapping[int, Episode]) -> None:
        station = self._stations[name]
        passed = [i for i in episodes if await self._passes(station.gate, i)]
        for index in episodes:
            if index not in passed:
                station.desk.skip()
                self._found[name, index].set_result(Verdict())
        if passed:
            asked = [episodes[i] for i in passed]
            verdicts = await station.desk.judge(asked, ticket=self._ticket)
            self._tell(name, passed, verdicts)

    async def _passes(self, gate: ScoreGate | None, index: int) -> bool:
        # Shielded: whoever gives up waiting must not cancel what others wait for, too.
        return gate is None or gate.passes(await asyncio.shield(self._found[gate.scorer, index]))

    def _tell(self, name: str, indices: Sequence[int], verdicts: Sequence[Verdict]) -> None:
        for index, verdict in zip(indices, verdicts, strict=True):
            self._found[name, index].set_result(verdict)
