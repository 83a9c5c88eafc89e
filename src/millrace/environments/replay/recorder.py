"""Converts finished episodes to recordings, and recordings back to the same episodes.

Restoring an episode needs neither an engine nor a tokenizer.
"""

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import Completion, Episode, Kept, Rollout, Task, Turn
from millrace.environments.event_log import FinishedTurn
from millrace.environments.replay.schema import (
    AgentRow,
    Entry,
    KeptRow,
    ModelRow,
    Recording,
    RoutesRow,
    TaskRow,
    TurnRow,
)
from millrace.environments.token_record import Exchange, TokenRecord

if TYPE_CHECKING:
    from millrace.environments.episode_state import EpisodeState


def recording_of(
    episode: Episode, task: Task, *, state: "EpisodeState", ended_reward: float
) -> Recording:
    agents = state.agents.values()
    models = {agent.model for agent in agents}
    return Recording(
        name=state.name,
        index=state.index,
        seed=state.seed,
        random_index=state.random_index,
        task=_task_row(task),
        limits=state.limits,
        max_context=state.max_context,
        ended_reward=ended_reward,
        tool_format=state.tool_format.name,
        history=state.history,
        template=state.renderer.template_settings,
        sampling=state.sampling,
        agents=[
            AgentRow(name=a.name, adapter=a.adapter, model=a.model, is_trained=a.is_trained)
            for a in agents
        ],
        models={
            name: ModelRow(
                path=other.path,
                max_context=other.max_context,
                tool_format=other.tool_format.name,
                template=other.renderer.template_settings,
            )
            for name, other in state.others.items()
            if name in models
        },
        entries=_entries(state),
        reward=episode.reward,
        ending=episode.ending,
        counts=episode.counts,
        branching=episode.branching,
    )


def _task_row(task: Task) -> TaskRow:
    columns = {name: value for name, value in task.columns.items() if _is_json(value)}
    return TaskRow(
        prompt=task.prompt,
        columns=columns,
        left_out=[name for name in task.columns if name not in columns],
        source=task.source,
    )


def _is_json(value: Any) -> bool:
    """True if the value survives encoding as JSON unchanged."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value)) == value
    except (TypeError, ValueError):  # comparing arrays gives no single answer
        return False


def _entries(state: "EpisodeState") -> list[Entry]:
    events = state.log.events
    numbers = {e.exchange: e.number for e in events if isinstance(e, FinishedTurn)}
    return [_turn_row(e, numbers) if isinstance(e, FinishedTurn) else e for e in events]


def _turn_row(turn: FinishedTurn, numbers: dict[Exchange, int]) -> TurnRow:
    exchange, completion = turn.exchange, turn.exchange.completion
    kept, routes = completion.kept, completion.routes
    return TurnRow(
        number=turn.number,
        agent=turn.agent,
        prompt=turn.prompt,
        parent=None if exchange.parent is None else numbers[exchange.parent],
        start=exchange.start,
        given=exchange.given.tolist(),
        tokens=completion.tokens.tolist(),
        logprobs=np.asarray(completion.logprobs, np.float32).tolist(),
        versions=completion.versions.tolist(),
        kept=None if kept is None else KeptRow(kept.ids.tolist(), kept.offsets.tolist()),
        routes=None if routes is None else _routes_row(routes),
        finish=completion.finish,
        text=completion.text,
        kv=completion.kv,
        num_shared=completion.num_shared,
        sampling=exchange.sampling,
        is_recorded=bool((completion.versions >= 0).any()) or not len(completion.tokens),
    )


def _routes_row(routes: np.ndarray) -> RoutesRow:
    data = routes.astype(routes.dtype.newbyteorder("<")).tobytes()
    is_short = routes.dtype == np.uint8
    return RoutesRow(shape=routes.shape, dtype="uint8" if is_short else "uint16", data=data)


def task_of(recording: Recording) -> Task:
    """Return the task, without the columns that could not be recorded."""
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
    """Return the completion; after an edit its tokens are context and have no version."""
    versions = row.versions if row.is_recorded else [-1] * len(row.tokens)
    kept = row.kept
    return Completion(
        tokens=np.array(row.tokens, np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(versions, np.int32),
        kept=None
        if kept is None
        else Kept(ids=np.array(kept.ids, np.int32), offsets=np.array(kept.offsets, np.int64)),
        # After an edit, the recorded routes belong to other preceding tokens.
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
            f"A recording has routes of shape {row.shape} in {len(row.data)} bytes, which does not"
            " fit; record the episode again."
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
