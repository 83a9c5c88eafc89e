"""Converts finished episodes to recordings, and recordings back to the same episodes.

Restoring an episode needs neither an engine nor a tokenizer.
"""

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.core.records import Episode, Rollout, Task, Turn
from millrace.environments.replay.schema import EpisodeSettings, Recording
from millrace.environments.token_record import Exchange, TokenRecord

if TYPE_CHECKING:
    from millrace.environments.episode_state import EpisodeState


def recording_of(episode: Episode, task: Task, *, state: "EpisodeState") -> Recording:
    settings = {name: getattr(state.settings, name) for name in EpisodeSettings.__struct_fields__}
    columns = {name: value for name, value in task.columns.items() if _is_json(value)}
    agents = [agent.row for agent in state.agents.values()]
    return Recording(
        **settings,
        task=replace(task, columns=columns),
        left_out=[name for name in task.columns if name not in columns],
        agents=agents,
        models={name: state.models[name].row for row in agents if (name := row.model) is not None},
        entries=state.log.entries,
        reward=episode.reward,
        ending=episode.ending,
        counts=episode.counts,
        branching=episode.branching,
    )


def _is_json(value: Any) -> bool:
    """True if the value survives encoding as JSON unchanged."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value)) == value
    except (TypeError, ValueError):  # comparing arrays gives no single answer
        return False


def episode_of(recording: Recording) -> Episode:
    return Episode(
        turns=tuple(
            Turn(
                prompt=row.prompt,
                completion=row.completion.text,
                finish=row.completion.finish,
                agent=row.agent,
            )
            for row in recording.turns
        ),
        rollouts=_rollouts(recording),
        reward=recording.reward,
        ending=recording.ending,
        counts=recording.counts,
        branching=recording.branching,
    )


def _rollouts(recording: Recording) -> tuple[Rollout, ...]:
    records = {agent.name: TokenRecord() for agent in recording.agents}
    exchanges: dict[int, Exchange] = {}  # by number of the turn
    for row in recording.turns:
        exchanges[row.number] = records[row.agent].add(
            row.given,
            row.completion,
            sampling=row.sampling,
            parent=None if row.parent is None else exchanges[row.parent],
            at=row.start,
        )
    sizes = [len(row.completion.tokens) for row in recording.turns]
    places = dict(zip(exchanges.values(), accumulate(sizes, initial=0), strict=False))
    return tuple(
        replace(rollout, agent=agent.name)
        for agent in recording.agents
        if agent.is_trained
        for rollout in records[agent.name].rollouts(places if recording.branching else None)
    )
