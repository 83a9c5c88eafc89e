"""The scoring of one group, from its first finished episode to its last result.

    scoring.stream_callback(request)   while tokens are sampled, for scorers that stream
    scoring.add(index, episode)        as each episode finishes, while others are generating
    await scoring.results(group)       once all have finished; one list per scorer

A scorer that takes single episodes is called at once. A scorer that takes whole groups is called
when the group is complete. A scorer behind a gate is called when the gate's scorer has scored the
episode. Runs on the controller's event loop with one task per scorer and call. Leaving the `with`
block ends them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Self

import numpy as np

from millrace.core.errors import user_code
from millrace.core.protocols import OnTokens, Scorer, StreamingScorer
from millrace.core.records import CompletionChunk, Episode, Group, Request, ScorerResult
from millrace.scoring.scheduling.scorer_queue import GroupRef, ScoreGate, ScorerQueue


class GroupScoring:
    def __init__(self, queues: Mapping[str, ScorerQueue], *, group: GroupRef) -> None:
        """`queues` by scorer name."""
        self._queues = queues
        self._group = group
        self._episodes: dict[int, Episode] = {}
        # By scorer and episode; for a scorer that takes groups, by its first episode.
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._results: defaultdict[tuple[str, int], asyncio.Future[ScorerResult]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Cancel what is still running."""
        for task in self._tasks.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # retrieved, or asyncio would log it as never retrieved

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """The scorers, in the order of results()."""
        return tuple(queue.scorer for queue in self._queues.values())

    @property
    def takes_episodes(self) -> bool:
        """True if some scorer takes an episode while others of its group are generating."""
        return any(not queue.takes_groups for queue in self._queues.values())

    def add(self, index: int, episode: Episode) -> None:
        """Start to score a finished episode; `index` is its number among those that started."""
        assert index not in self._episodes, f"episode {index} was added before"
        self._episodes[index] = episode
        for name, queue in self._queues.items():
            if not queue.takes_groups:
                self._start(name, {index: episode})

    def stream_callback(self, request: Request) -> OnTokens | None:
        """Return the receiver of the tokens of `request`, or None if no scorer streams."""
        callbacks: dict[str, OnTokens] = {}
        for name, queue in self._queues.items():
            # A scorer with a gate may never be called for the episode.
            if queue.gate is None and isinstance(queue.scorer, StreamingScorer):
                with user_code(f"Scorer {name!r}"):
                    callback = queue.scorer.stream_callback(request, task=self._group.task)
                if callback is not None:
                    callbacks[name] = callback
        if not callbacks:
            return None

        def forward(chunk: CompletionChunk) -> None:
            for name, callback in callbacks.items():
                with user_code(f"Scorer {name!r}"):
                    callback(chunk)

        return forward

    async def token_rewards(self, index: int) -> list[np.ndarray]:  # [L] per rollout
        """Return the weighted token rewards of an added episode; raises what a scorer raises."""
        rewards = [np.zeros(len(r.tokens), np.float32) for r in self._episodes[index].rollouts]
        for name, queue in self._queues.items():
            if queue.takes_groups or queue.gate is not None:  # a gate may need the whole group
                continue
            # Shielded: the group still needs this result if the caller is cancelled.
            await asyncio.shield(self._tasks[name, index])
            token_scores = self._results[name, index].result().token_scores
            for total, scores in zip(rewards, token_scores, strict=False):
                if scores.rewards is not None:
                    total += queue.scorer.weight * scores.rewards
        return rewards

    async def results(self, group: Group) -> list[list[ScorerResult]]:
        """Return one list per scorer with one result per episode; raises the first error."""
        episodes = {self._index_of(episode): episode for episode in group.episodes}
        for name, queue in self._queues.items():
            if queue.takes_groups:
                self._start(name, episodes)
        # Do not wait for added episodes that are not part of the group.
        await asyncio.gather(*(task for (_, i), task in self._tasks.items() if i in episodes))
        return [[self._results[name, i].result() for i in episodes] for name in self._queues]

    def _index_of(self, episode: Episode) -> int:
        """Find an added episode, or add it. An oversampled group has more added than it keeps."""
        for index, added in self._episodes.items():
            if added is episode:
                return index
        index = max(self._episodes, default=-1) + 1
        self.add(index, episode)
        return index

    def _start(self, name: str, episodes: Mapping[int, Episode]) -> None:
        self._tasks[name, min(episodes)] = asyncio.create_task(self._score(name, episodes))

    async def _score(self, name: str, episodes: Mapping[int, Episode]) -> None:
        queue = self._queues[name]
        passed = [i for i in episodes if await self._passes(queue.gate, i)]
        for index in episodes:
            if index not in passed:
                queue.skip()
                self._results[name, index].set_result(ScorerResult())
        if passed:
            results = await queue.score([episodes[i] for i in passed], group=self._group)
            for index, result in zip(passed, results, strict=True):
                self._results[name, index].set_result(result)

    async def _passes(self, gate: ScoreGate | None, index: int) -> bool:
        # Shielded: others wait for the same result and must not be cancelled with this caller.
        return gate is None or gate.passes(await asyncio.shield(self._results[gate.scorer, index]))
