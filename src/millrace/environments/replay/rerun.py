"""Runs an environment again on a recording of one of its episodes, without an engine or tools.

The coroutine runs, and its agents render and record, as they did the first time. Replies, tool
results and the draws of agent.rng come from the recording.

Promise: the episode is the same, bit for bit, or a ReplayError names the first request that
differs. Everything else that the environment does is repeated, so it must be deterministic.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.core.errors import ReplayError
from millrace.core.records import Episode, Task
from millrace.environments.episode_runner import EnvironmentFunction, run_episode
from millrace.environments.episode_state import EpisodeState
from millrace.environments.replay.answers import RecordedAnswers
from millrace.environments.replay.recorder import recording_of
from millrace.environments.replay.schema import ModelRow, Recording, encode
from millrace.environments.role_models import RoleModel
from millrace.environments.rollouts.renderer import Renderer


async def rerun(
    recording: Recording,
    function: EnvironmentFunction,
    *,
    tokenizer: Any,
    tokenizers: Mapping[str, Any] | None = None,
    task: Task | None = None,
) -> Episode:
    """Return the replayed episode, with a recording of its own. `tokenizers` belong to the
    recording's other models, by name. `task` replaces the recorded task, which may lack columns."""
    if task is None and recording.left_out:
        names = ", ".join(recording.left_out)
        raise ReplayError(f"The columns {names} of the task could not be recorded; pass the task.")
    tokenizers = tokenizers or {}
    if missing := [name for name in recording.models if name not in tokenizers]:
        raise ReplayError(
            f"Roles of the recording use other models ({', '.join(missing)}), and their tokenizers"
            " are missing; pass tokenizers={name: tokenizer}."
        )
    others = {name: _model(row, tokenizers[name]) for name, row in recording.models.items()}
    answers = RecordedAnswers(recording)
    state = answers.state = EpisodeState(
        recording,
        models={None: _model(recording.policy, tokenizer), **others},
        sample=answers.sample,
        root=recording.index,
        run_tool=answers.run_tool,
    )
    task = recording.task if task is None else task
    episode = await run_episode(function, task, state=state, branching=recording.branching)
    answers.check_complete()
    return replace(episode, recording=encode(recording_of(episode, task, state=state)))


def _model(row: ModelRow, tokenizer: Any) -> RoleModel:
    return RoleModel(row, Renderer(tokenizer, template_settings=row.template))
