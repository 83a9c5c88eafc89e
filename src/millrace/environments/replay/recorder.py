"""An episode that was played -> its recording. Runs on the loop of the environments."""

from typing import Any

import msgspec
import numpy as np

from millrace.core.records import Episode, Kept, Task
from millrace.environments.agent_set import AgentSet
from millrace.environments.episode_state import EpisodeState
from millrace.environments.other_models import OtherModel
from millrace.environments.replay.schema import (
    AgentRow,
    CutRow,
    Entry,
    KeptRow,
    ModelRow,
    Recording,
    RoutesRow,
    TaskRow,
    ToolRow,
    TurnRow,
)
from millrace.environments.tape import CutTurn, TakenTurn, ToolRun
from millrace.environments.token_record import Exchange
from millrace.environments.tools.calls import name_of


def recording_of(
    episode: Episode, task: Task, *, state: EpisodeState, agents: AgentSet, ended_reward: float
) -> Recording:
    return Recording(
        name=state.name,
        index=state.index,
        seed=state.seed,
        random_index=state.random_index,
        task=_task(task),
        limits=state.limits,
        max_context=state.max_context,
        ended_reward=ended_reward,
        tool_format=name_of(agents.tool_format),
        history=agents.history,
        template=agents.template_settings,
        sampling=agents.sampling,
        agents=[
            AgentRow(
                name=agent.name,
                adapter=agent.adapter,
                model=agent.model,
                is_trained=agent.is_trained,
            )
            for agent in agents.agents
        ],
        models={name: _model(other) for name, other in agents.others.items()},
        entries=_entries(state),
        reward=episode.reward,
        ending=episode.ending,
        counts=episode.counts,
        branching=episode.branching,
    )


def _model(other: OtherModel) -> ModelRow:
    return ModelRow(
        path=other.path,
        max_context=other.max_context,
        tool_format=name_of(other.tool_format),
        template=other.renderer.template_settings,
    )


def _task(task: Task) -> TaskRow:
    sayable = {name: value for name, value in task.columns.items() if _is_json(value)}
    return TaskRow(
        prompt=task.prompt,
        columns=sayable,
        left_out=[name for name in task.columns if name not in sayable],
        source=task.source,
    )


def _is_json(value: Any) -> bool:
    """True if it is the same after it was written and read."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value)) == value
    except (TypeError, ValueError):  # of an array, == has no single answer
        return False


def _entries(state: EpisodeState) -> list[Entry]:
    entries = state.tape.entries
    numbers = {e.exchange: e.number for e in entries if isinstance(e, TakenTurn)}
    rows: list[Entry] = []
    for entry in entries:
        if isinstance(entry, TakenTurn):
            rows.append(_turn(entry, numbers))
        elif isinstance(entry, CutTurn):
            rows.append(CutRow(number=entry.number, agent=entry.agent, ending=entry.ending))
        else:
            rows.append(_tool(entry))
    return rows


def _turn(entry: TakenTurn, numbers: dict[Exchange, int]) -> TurnRow:
    exchange, completion = entry.exchange, entry.exchange.completion
    return TurnRow(
        number=entry.number,
        agent=entry.agent,
        prompt=entry.prompt,
        parent=None if exchange.parent is None else numbers[exchange.parent],
        start=exchange.start,
        given=exchange.given.tolist(),
        tokens=completion.tokens.tolist(),
        logprobs=np.asarray(completion.logprobs, np.float32).tolist(),
        versions=completion.versions.tolist(),
        kept=None if completion.kept is None else _kept(completion.kept),
        routes=None if completion.routes is None else _routes(completion.routes),
        finish=completion.finish,
        text=completion.text,
        kv=completion.kv,
        num_shared=completion.num_shared,
        sampling=exchange.sampling,
        is_recorded=bool((completion.versions >= 0).any()) or not len(completion.tokens),
    )


def _kept(kept: Kept) -> KeptRow:
    return KeptRow(ids=kept.ids.tolist(), offsets=kept.offsets.tolist())


def _routes(routes: np.ndarray) -> RoutesRow:
    data = routes.astype(routes.dtype.newbyteorder("<")).tobytes()
    is_short = routes.dtype == np.uint8
    return RoutesRow(shape=routes.shape, dtype="uint8" if is_short else "uint16", data=data)


def _tool(entry: ToolRun) -> ToolRow:
    return ToolRow(
        number=entry.number,
        name=entry.name,
        arguments=dict(entry.arguments),
        text=None if entry.result is None else entry.result.text,
        fault=None if entry.result is None else entry.result.fault,
        has_turns=entry.has_turns,
    )
