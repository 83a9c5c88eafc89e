"""`millrace replay`: reads, reruns, edits and rescores recorded episodes, without an engine."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.cluster.hub import Hub
from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import ScorerConfig, load_config
from millrace.core.errors import ConfigError, MillraceError, printable
from millrace.core.records import Group, Score
from millrace.environments.function_environment import EnvironmentFunction, check_function, rerun
from millrace.environments.replay.recordings import (
    Line,
    episode_of,
    read_recordings,
    with_tool_results,
    write_recordings,
)
from millrace.environments.replay.schema import Recording, decode
from millrace.models.directory import load_tokenizer
from millrace.scoring.advantages import GroupAdvantages
from millrace.scoring.functions.user_function import resolve_function
from millrace.scoring.pool import (
    ScorerSpec,
    build_scorer_pool,
    function_scorer,
    resolve_scorer,
    resolve_scorers,
)
from millrace.scoring.reward_models.reward_model import ProcessRewardModel, RewardModel
from millrace.scoring.teachers.teacher import Reference, TeacherSettings


async def replay(
    path: Path,
    *,
    environment: str | None,  # "module:name"; None = the environment is not run again
    model: str | None,  # model of the tokenizer; None = the recorded one
    scores: Sequence[str],  # "module:name" of reward functions, or names of verifiers
    config: Path | None,  # config with [[scorers]]
    tool_results: Sequence[str],  # "NUMBER=TEXT", for every episode
    reward: float | None,  # replaces the environment's
    out: Path | None,  # file for the resulting episodes
) -> None:
    if tool_results and environment is None:
        raise ConfigError(
            "--tool-result changes what the environment sees; name it with --environment."
        )
    lines = list(read_recordings(path))
    if environment is not None:
        function, load = check_function(resolve_function(environment)), cache(load_tokenizer)
        texts = dict(map(_tool_result, tool_results))
        if None in {model or line.model for line in lines}:
            raise ConfigError(f"{path} does not name the model; pass --model.")
        lines = [await _rerun(line, function, load, model=model, texts=texts) for line in lines]
    if reward is not None:
        lines = [replace(line, episode=replace(line.episode, reward=reward)) for line in lines]
    specs = [
        function_scorer(name)
        if ":" in name
        else resolve_scorer(ScorerConfig(type=name), section="score")
        for name in scores
    ]
    if specs := specs + resolve_scorers(() if config is None else load_config(config).scorers):
        lines = await _scored(lines, specs)
    for line in lines:
        print(printable(_summary(line)))
    if out is not None:
        write_recordings(out, lines)


def _tool_result(text: str) -> tuple[int, str | None]:
    number, equals, result = text.partition("=")
    if not number.isdecimal():
        raise ConfigError(
            f"--tool-result {text!r} does not begin with the number of a call; write NUMBER=TEXT,"
            " or NUMBER."
        )
    return int(number), result if equals else None


async def _rerun(
    line: Line,
    function: EnvironmentFunction,
    load: Callable[[str], Any],
    *,
    model: str | None,
    texts: Mapping[int, str | None],
) -> Line:
    edited = with_tool_results(line.episode, texts)
    tokenizers = {name: load(row.path) for name, row in edited.models.items()}
    tokenizer = load(str(model or line.model))
    episode = await rerun(edited, function, tokenizer=tokenizer, tokenizers=tokenizers)
    assert episode.recording is not None
    return replace(line, episode=decode(episode.recording, Recording))


def _check_needs_no_run(specs: Sequence[ScorerSpec]) -> None:
    for spec in specs:
        takes_ids = isinstance(spec.type, RewardModel) and spec.type.template == "ids"
        if takes_ids or isinstance(spec.type, ProcessRewardModel | TeacherSettings | Reference):
            raise ConfigError(
                f"Scorer {spec.name!r} reads the tokens of a training run, which a replay does not"
                " have; remove it from the config."
            )


async def _scored(lines: Sequence[Line], specs: Sequence[ScorerSpec]) -> list[Line]:
    _check_needs_no_run(specs)
    groups: dict[int | str, list[Line]] = {}
    for line in lines:
        key = line.episode.name if line.group is None else line.group
        groups.setdefault(key, []).append(line)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-")))
        hub = await stack.enter_async_context(Hub(log_dir=folder, on_event=lambda *_: None))
        worker_pool = await stack.enter_async_context(WorkerPool(hub.launch))
        pool = build_scorer_pool(
            specs,
            advantages=GroupAdvantages(),
            num_workers=1,
            worker_pool=worker_pool,
            private=folder,
            folder=folder,
        )
        await stack.enter_async_context(pool)
        scores: dict[int, Score] = {}
        for number, members in enumerate(groups.values()):
            scored = await pool.score(_group(number, members))
            scores |= {id(m): score for m, score in zip(members, scored.scores, strict=True)}
    return [
        replace(line, score=scores[id(line)].total, parts=scores[id(line)].parts, advantage=None)
        for line in lines
    ]


def _group(number: int, lines: Sequence[Line]) -> Group:
    recordings = [line.episode for line in lines]
    for recording in recordings:
        if not recording.turns:
            raise MillraceError(
                f"Episode {recording.index} of {recording.name} has no turns and cannot be scored;"
                " remove its line."
            )
    episodes = tuple(episode_of(recording) for recording in recordings)
    return Group(number=number, task=recordings[0].task, episodes=episodes)


def _summary(line: Line) -> str:
    recording = line.episode
    changed = sum(not turn.is_recorded for turn in recording.turns)
    row: dict[str, Any] = {
        "group": line.group,
        "episode": recording.index,
        "turns": len(recording.turns),
        **({"turns_not_recorded": changed} if changed else {}),
        "ending": recording.ending,
        "reward": recording.reward,
        "score": line.score,
        "parts": line.parts,
    }
    return json.dumps(row, ensure_ascii=False)
