"""Runs an environment again on a recording of one of its episodes, without an engine or tools.

The coroutine runs, and its agents render and record, as they did the first time. Replies, tool
results and the draws of agent.rng come from the recording.

Promise: the episode is the same, bit for bit, or a ReplayError names the first request that
differs. Everything else that the environment does is repeated, so it must be deterministic.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.core.records import Episode, Task
from millrace.environments.episode_runner import EnvironmentFunction, run_episode
from millrace.environments.episode_state import EpisodeState
from millrace.environments.other_models import OtherModel
from millrace.environments.replay.answers import RecordedAnswers, ReplayError
from millrace.environments.replay.recorder import recording_of, task_of
from millrace.environments.replay.schema import Recording, encode
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.tools.calls import FORMATS


async def rerun(
    recording: Recording,
    function: EnvironmentFunction,
    *,
    tokenizer: Any,
    tokenizers: Mapping[str, Any] | None = None,
    task: Task | None = None,
) -> Episode:
    """Return the replayed episode, with a recording of its own.

    `tokenizers` belong to the recording's other models, by name. `task` replaces the recorded task,
    which may lack columns.
    """
    if task is None and recording.task.left_out:
        names = ", ".join(recording.task.left_out)
        raise ReplayError(f"The columns {names} of the task could not be recorded; pass the task.")
    renderer = Renderer(tokenizer, template_settings=recording.template)
    others = _others(recording, tokenizers or {})
    answers = RecordedAnswers(recording, renderer=renderer, others=others)
    state = answers.state = EpisodeState(
        name=recording.name,
        index=recording.index,
        sample=answers.sample,
        renderer=renderer,
        tool_format=FORMATS[recording.tool_format],
        sampling=recording.sampling,
        max_context=recording.max_context,
        history=recording.history,
        limits=recording.limits,
        others=others,
        seed=recording.seed,
        root=recording.index,
        random_index=recording.random_index,
        run_tool=answers.run_tool,
    )
    task = task_of(recording) if task is None else task
    reward = recording.ended_reward
    episode = await run_episode(
        function, task, state=state, ended_reward=reward, branching=recording.branching
    )
    answers.check_complete()
    again = recording_of(episode, task, state=state, ended_reward=reward)
    return replace(episode, recording=encode(again))


def _others(recording: Recording, tokenizers: Mapping[str, Any]) -> dict[str, OtherModel]:
    missing = [name for name in recording.models if name not in tokenizers]
    if missing:
        raise ReplayError(
            f"Roles of the recording use other models ({', '.join(missing)}), and their tokenizers"
            " are missing; pass tokenizers={name: tokenizer}."
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
