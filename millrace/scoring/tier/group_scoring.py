"""The scoring of one group, from its first finished episode to its last verdict.

    scoring.add(index, episode)        as each finishes, while its siblings are still generating
    await scoring.verdicts(group)      once all have; a column per scorer

A scorer that takes single episodes is asked at once, one that compares a group when it is complete,
and one behind a gate when the scorer it waits for has spoken about the episode.
Runs on the controller's event loop: a task for each scorer and episode, ended by close().
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from millrace.core.protocols import Scorer
from millrace.core.records import Episode, Group, Verdict
from millrace.scoring.tier.desk import Desk, Ticket
from millrace.scoring.tier.gates import Gate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Station:
    """A scorer's place among the others of a run."""

    desk: Desk
    gate: Gate | None


class GroupScoring:
    def __init__(self, stations: Mapping[str, Station], *, ticket: Ticket) -> None:
        """`stations`: by the name of the scorer."""
        self._stations = stations
        self._ticket = ticket
        self._episodes: dict[int, Episode] = {}
        self._tasks: list[asyncio.Task[None]] = []
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

    def add(self, index: int, episode: Episode) -> None:
        """This episode is finished. `index`: its place in the group."""
        assert index not in self._episodes, f"episode {index} is finished once"
        self._episodes[index] = episode
        for name, station in self._stations.items():
            if not station.desk.takes_groups:
                self._spawn(self._judge(name, {index: episode}))

    async def verdicts(self, group: Group) -> list[list[Verdict]]:
        """A column per scorer, a verdict per episode. Raises what the first scorer that fails
        raises: the others need not go on then."""
        episodes = dict(enumerate(group.episodes))
        for index, episode in episodes.items():
            if index not in self._episodes:
                self.add(index, episode)
            assert self._episodes[index] is episode, "what was judged is what is trained"
        for name, station in self._stations.items():
            if station.desk.takes_groups:
                self._spawn(self._judge(name, episodes))
        await asyncio.gather(*self._tasks)
        return [[self._found[name, i].result() for i in episodes] for name in self._stations]

    def close(self) -> None:
        """Nobody waits for what is still missing."""
        for task in self._tasks:
            if not task.cancel() and not task.cancelled():
                task.exception()  # looked at, or asyncio warns that nobody did

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

    async def _passes(self, gate: Gate | None, index: int) -> bool:
        # Shielded: whoever gives up waiting must not cancel what others wait for, too.
        return gate is None or gate.passes(await asyncio.shield(self._found[gate.scorer, index]))

    def _tell(self, name: str, indices: Sequence[int], verdicts: Sequence[Verdict]) -> None:
        for index, verdict in zip(indices, verdicts, strict=True):
            self._found[name, index].set_result(verdict)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))
