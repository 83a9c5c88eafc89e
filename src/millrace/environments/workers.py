"""The processes that run the environment of a run, beside the controller or on other hosts.

A worker runs the coroutines, renders prompts and runs tools. The controller samples the turns that
a worker asks for, so that admission, the journal and cancellation are as without workers.

Promise: each episode of a worker that dies or hangs is played again on another worker, and turns
that were sampled, or are being sampled, are not sampled again if the environment asks for the same.
An episode that loses its worker MAX_LOST times fails its group.

Runs on the controller's event loop. Admission bounds the number of episodes.
"""

import asyncio
import itertools
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from millrace.cluster import messages
from millrace.cluster.supervision.pool import WorkerPool
from millrace.cluster.supervision.replica import ModuleReplica
from millrace.cluster.wire import WireError, encode
from millrace.cluster.worker import Worker
from millrace.core.errors import RunFailed, TaskError, WorkerError, first_cause, run_all
from millrace.core.records import Completion
from millrace.environments.episode_state import Sample
from millrace.environments.function_environment import EpisodePlan, PlayedEpisode
from millrace.environments.replay import schema

OPEN_TO_HOSTS = (
    "Its host starts another; if that has left, run `millrace join --role environment` on any host."
)
MAX_LOST = 3  # workers that may die under one episode; it may be what kills them


@dataclass(eq=False, kw_only=True)
class EnvironmentReplica(ModuleReplica):
    joins: bool = False  # from another host
    num_live: int = 0  # episodes that it plays now


class EnvironmentWorkers:
    def __init__(self, worker_pool: WorkerPool, replicas: list[EnvironmentReplica]) -> None:
        self._worker_pool = worker_pool
        self._replicas = replicas
        self._changed = asyncio.Event()  # a worker serves, or never will
        self._keys = itertools.count()
        for replica in replicas:
            replica.on_change = self._changed.set

    async def start(self) -> None:
        """Start all workers; raises the first error."""
        # Environments may kill their process any number of times: MAX_LOST limits each episode.
        policy = replace(self._worker_pool.policy, limit_deaths=False)
        joining = replace(policy, remedy=OPEN_TO_HOSTS)
        await run_all(
            self._worker_pool.add(each, policy=joining if each.joins else policy)
            for each in self._replicas
        )

    async def close(self) -> None:
        await asyncio.gather(*(self._worker_pool.remove(each.name) for each in self._replicas))

    async def play(self, plan: EpisodePlan, sample: Sample) -> PlayedEpisode:
        """Play an episode in a worker; this is an EpisodeHost."""
        turns = _Turns(sample, episode=plan.settings.index)
        lost = ""
        try:
            for _ in range(MAX_LOST):
                replica, worker = await self._least_busy()
                replica.num_live += 1
                try:
                    return await self._play_on(worker, plan, turns)
                except WorkerError as error:
                    replica.drop(worker)  # its end may not be noticed yet
                    lost = str(error)
                finally:
                    replica.num_live -= 1
        finally:
            turns.close()
        raise TaskError(
            f"{plan.settings.name}: episode {plan.settings.index} lost its environment worker"
            f" {MAX_LOST} times, the last time because: {lost}"
        )

    async def _least_busy(self) -> tuple[EnvironmentReplica, Worker]:
        while True:
            serving = [(each, worker) for each in self._replicas if (worker := each.serving_worker)]
            if serving:
                return min(serving, key=lambda pair: pair[0].num_live)
            failures = [replica.given_up for replica in self._replicas]
            if None not in failures:
                raise RunFailed(f"No environment worker is left: {failures[-1]}")
            self._changed.clear()
            await self._changed.wait()

    async def _play_on(self, worker: Worker, plan: EpisodePlan, turns: "_Turns") -> PlayedEpisode:
        key = next(self._keys)

        def on_part(part: messages.Part) -> None:
            if isinstance(part, messages.TurnDropped):
                turns.drop(part.call)
            elif isinstance(part, messages.TurnWanted):
                answers.create_task(_answer(worker, turns.sampling(part), key=key, call=part.call))

        try:
            with first_cause():
                async with asyncio.TaskGroup() as answers:
                    message = messages.PlayEpisode(key=key, plan=plan)
                    played = await worker.call(message, on_part=on_part, expect_progress=True)
                    turns.close()  # of tasks that the environment left running
        except WireError as error:  # of the task; its columns are the user's
            raise TaskError(f"{plan.settings.name}: {error}") from None
        except BaseException:
            await worker.emit(messages.CancelEpisode(key=key))
            raise
        assert isinstance(played, messages.EpisodePlayed)
        if played.recording is None:
            return played.episode, None
        return played.episode, schema.decode(played.recording, schema.Recording)


class _Turns:
    """The turns of one episode, which outlive its workers."""

    def __init__(self, sample: Sample, *, episode: int) -> None:
        self._sample = sample
        self._episode = episode
        self._known: dict[int, tuple[bytes, asyncio.Future[Completion]]] = {}  # by call

    def sampling(self, wanted: messages.TurnWanted) -> asyncio.Future[Completion]:
        """Sample a turn, or return what an earlier worker asked for with the same arguments."""
        digest = blake2b(b"".join(encode(wanted))).digest()
        known = self._known.get(wanted.call)
        if known is None or known[0] != digest:
            self.drop(wanted.call)
            turn = asyncio.ensure_future(self._sample(wanted, episode=self._episode))
            known = self._known[wanted.call] = digest, turn
        return known[1]

    def drop(self, call: int) -> None:
        if (known := self._known.pop(call, None)) is not None:
            turn = known[1]
            turn.add_done_callback(lambda done: done.cancelled() or done.exception())
            turn.cancel()

    def close(self) -> None:
        for call in [*self._known]:
            self.drop(call)


async def _answer(worker: Worker, turn: asyncio.Future[Completion], *, key: int, call: int) -> None:
    """Send a turn to the worker that wants it, or a TaskError, which environments may handle. Any
    other error ends the episode."""
    await asyncio.wait({turn})  # cancelling this answer does not cancel the turn
    if turn.cancelled():
        return
    outcome: dict[str, Any] = {"completion": None}
    try:
        outcome["completion"] = turn.result()
    except TaskError as error:
        outcome["error"] = str(error)
    await worker.emit(messages.TurnSampled(key=key, call=call, **outcome))
