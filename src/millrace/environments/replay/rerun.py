"""Replays an environment on a recording: no engine, no tools, the same episode.

The coroutine runs as it did, its agents render and record as they did; only what came from outside
is taken from the recording: replies, results of tools, draws of agent.rng.

Promise: the episode is the same, bit for bit, or a ReplayError says where the environment asked
something else. What it does besides takes the time it takes, and is the same only if it is
deterministic itself.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.core.records import Episode, Task
from millrace.environments.agent_set import AgentSet
from millrace.environments.episode_runner import EnvironmentFunction, run_episode
from millrace.environments.episode_state import EpisodeState
from millrace.environments.other_models import OtherModel
from millrace.environments.replay.answers import ORDER_TIMEOUT_S, RecordedAnswers, ReplayError
from millrace.environments.replay.episodes import task_of
from millrace.environments.replay.recorder import recording_of
from millrace.environments.replay.schema import Recording, encode
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import FORMATS
from millrace.environments.tools.functions import Tool, ToolResult, run_tool


async def rerun(
    recording: Recording,
    function: EnvironmentFunction,
    *,
    tokenizer: Any,
    tokenizers: Mapping[str, Any] | None = None,
    task: Task | None = None,
    order_timeout_s: float = ORDER_TIMEOUT_S,
) -> Episode:
    """The replayed episode, with a recording of its own. `tokenizers`: of the recording's other
    models, by name. `task`: replaces the recorded one, which may lack columns. `order_timeout_s`:
    how long an answer waits for those recorded before it."""
    if task is None and recording.task.left_out:
        names = ", ".join(recording.task.left_out)
        raise ReplayError(f"The columns {names} of the task could not be recorded; pass the task.")
    renderer = Renderer(tokenizer, template_settings=recording.template)
    others = _others(recording, tokenizers or {})
    answers = RecordedAnswers(
        recording, renderer=renderer, others=others, order_timeout_s=order_timeout_s
    )
    tool_runs = itertools.count()

    async def repeat(tool: Tool, arguments: Mapping[str, Any], **limits: Any) -> ToolResult:
        number = next(tool_runs)
        if answers.runs_again(number):
            return await run_tool(tool, arguments, **limits)
        return await answers.tool_run(number, tool, arguments)

    state = EpisodeState(
        name=recording.name,
        index=recording.index,
        sample=lambda prompt, *, call, **_settings: answers.turn(call, prompt),
        max_context=recording.max_context,
        limits=recording.limits,
        seed=recording.seed,
        random_index=recording.random_index,
        run_tool=repeat,
    )
    answers.state = state
    agents = AgentSet(
        state,
        renderer=renderer,
        history=recording.history,
        tool_format=FORMATS[recording.tool_format],
        sampling=recording.sampling,
        others=others,
    )
    task = task_of(recording) if task is None else task
    known: dict[str, Any] = {
        "state": state,
        "agents": agents,
        "ended_reward": recording.ended_reward,
    }
    episode = await run_episode(function, task, **known, branching=recording.branching)
    answers.check_complete()
    return replace(episode, recording=encode(recording_of(episode, task, **known)))


def _others(recording: Recording, tokenizers: Mapping[str, Any]) -> dict[str, OtherModel]:
    missing = [name for name in recording.models if name not in tokenizers]
    if missing:
        raise ReplayError(
            f"Roles of the recording were other models ({', '.join(missing)}), whose tokenizers are"
            " needed; pass tokenizers={name: tokenizer}."
        )
    return {
        name: OtherModel(
            path=row.path,
            renderer=Renderer(tokenizers[name], template_settings=row.template),
            tool_format=FORMATS[row.tool_format],
            max_context=row.max_context,
        )
        for name, row in recording.models.items()
    }
