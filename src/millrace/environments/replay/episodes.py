"""A recording -> its episode, exactly as it was played. Needs neither engine nor tokenizer."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import Completion, Episode, Kept, Rollout, Task, Turn
from millrace.environments.replay.schema import Recording, RoutesRow, TurnRow
from millrace.environments.token_record import Exchange, TokenRecord


def task_of(recording: Recording) -> Task:
    """Without the columns that could not be recorded."""
    row = recording.task
    return Task(prompt=row.prompt, columns=row.columns, source=row.source)


def episode_of(recording: Recording) -> Episode:
    return Episode(
        turns=tuple(
            Turn(prompt=row.prompt, completion=row.text, finish=row.finish, agent=row.agent)
            for row in recording.turns
        ),
        rollouts=_rollouts(recording),
        reward=recording.reward,
        ending=recording.ending,
        counts=recording.counts,
        branching=recording.branching,
    )


def completion_of(row: TurnRow) -> Completion:
    """Tokens behind an edit belong to no version: they are context, and never trained."""
    versions = row.versions if row.is_recorded else [-1] * len(row.tokens)
    kept = row.kept
    return Completion(
        tokens=np.array(row.tokens, np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(versions, np.int32),
        kept=None
        if kept is None
        else Kept(ids=np.array(kept.ids, np.int32), offsets=np.array(kept.offsets, np.int64)),
        # Behind an edit other tokens stand before these.
        routes=_routes(row.routes) if row.routes is not None and row.is_recorded else None,
        finish=row.finish,
        text=row.text,
        kv=row.kv,
        num_shared=row.num_shared,
    )


def _routes(row: RoutesRow) -> np.ndarray:  # [F, layers, top_k]
    dtype = np.dtype(row.dtype)
    if math.prod(row.shape) * dtype.itemsize != len(row.data):
        raise ConfigError(
            f"A recording has routes of shape {row.shape} in {len(row.data)} bytes, which do not go"
            " together; record the episode again."
        )
    return np.frombuffer(row.data, dtype.newbyteorder("<")).astype(dtype).reshape(row.shape)


def _rollouts(recording: Recording) -> tuple[Rollout, ...]:
    records = {agent.name: TokenRecord() for agent in recording.agents}
    exchanges: dict[int, Exchange] = {}  # by number of the turn
    for row in recording.turns:
        exchanges[row.number] = records[row.agent].add(
            np.array(row.given, np.int32),
            completion_of(row),
            sampling=row.sampling,
            parent=None if row.parent is None else exchanges[row.parent],
            at=row.start,
        )
    sizes = [len(row.tokens) for row in recording.turns]
    places = dict(zip(exchanges.values(), accumulate(sizes, initial=0), strict=False))
    return tuple(
        replace(rollout, agent=agent.name)
        for agent in recording.agents
        if agent.is_trained
        for rollout in records[agent.name].rollouts(places if recording.branching else None)
    )
