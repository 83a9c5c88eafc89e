"""What teachers and references share: the model process they ask, and the checks of that model.

L = tokens of a rollout.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from millrace.cluster.messages import StartTeacher
from millrace.core.errors import ConfigError, ScoreError
from millrace.core.records import (
    Group,
    Rollout,
    ScoreRequest,
    ScorerResult,
    TokenLogprobs,
    TokenScores,
)
from millrace.models.directory import load_tokenizer, text_config
from millrace.scoring.model_process import ModelHandle
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.settings import LogprobModelSettings

# One call per group, because its rollouts share their prompt. No retries: a model that cannot read
# a sequence fails again, and the process itself is restarted by its pool.
MODEL_CALLS = CallSettings(
    timeout_s=300.0, concurrency=1024, batch=0, retries=0, breaker_failures=0
)


class LogprobModel(ModelHandle, Protocol):
    """A model that computes the logprobs of given tokens, in a local process or on a server."""

    name: str

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises ScoreError."""
        ...


def make_process(
    settings: LogprobModelSettings,
    *,
    name: str,
    model: str,
    context: ScorerContext,
    following: dict[str, Any] | None = None,
) -> TeacherProcess:
    """Build a process that is not started yet. With `following` (HistorySettings as a dict) it is a
    self-teacher."""
    run = context.run_info
    start = StartTeacher(
        config=run.config.model_dump(mode="json"),
        settings=settings.process_settings(),
        device=run.config.placement.scorer(name),
        model_path=model,
        following=following,
        version=None if following is None else run.version,
        adapter_path=None if following is None else run.adapter_path,
        past=None if following is None else _state_file(name, context),
    )
    return TeacherProcess(
        name,
        start=start,
        worker_pool=context.worker_pool,
        start_timeout_s=context.start_timeout_s,
    )


def _state_file(name: str, context: ScorerContext) -> str:
    """The file in which a self-teacher saves its weights."""
    path = (context.folder / f"{name}.safetensors").absolute()
    if path.exists():
        from millrace.models.loading import read_weights_version  # takes seconds to import

        if read_weights_version(path) > context.run_info.version:
            path.unlink()  # the run resumed from an earlier version and will train these again
    return str(path)


def max_context_of(model: str, run: RunInfo) -> int:
    """The longest sequence that the model reads."""
    config = text_config(model, trust_remote_code=run.config.model.trust_remote_code)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None else run.max_context


def check_same_vocabulary(model: str, run: RunInfo, *, num_top: int, name: str) -> None:
    """Raise ConfigError unless token ids mean the same to the model and to the policy."""
    remote_code = run.config.model.trust_remote_code
    setting = f"model of scorer {name!r}"
    config = text_config(model, trust_remote_code=remote_code, setting=setting)
    theirs = load_tokenizer(model, trust_remote_code=remote_code).get_vocab()
    ours = run.tokenizer.get_vocab()
    if theirs != ours:
        example = min(theirs.items() ^ ours.items(), key=lambda item: item[::-1])[0]
        raise ConfigError(
            f"Scorer {name!r}: the tokenizer of {model!r} differs from that of"
            f" {run.config.model.path!r} (for example in {example!r}), so its logprobs would belong"
            " to other tokens; choose a model with the same tokenizer."
        )
    smallest = min(config.vocab_size, run.vocab_size)
    if config.vocab_size < len(ours):
        raise ConfigError(
            f"Scorer {name!r} knows {smallest} tokens, and the policy's tokenizer has {len(ours)};"
            " choose another model."
        )
    if num_top >= smallest:
        raise ConfigError(
            f"Scorer {name!r} knows {smallest} tokens, and top_k = {num_top}; lower top_k."
        )


def check_lengths(
    requests: Sequence[ScoreRequest], *, max_context: int | None, scorer: str, group: Group
) -> None:
    longest = max(len(request.inputs) for request in requests)
    if max_context is not None and longest > max_context:
        raise ScoreError(
            f"Teacher {scorer!r} reads at most {max_context} tokens, and group {group.number} has"
            f" {longest}; lower engine.max_context or sampling.max_new_tokens."
        )


def results_of(group: Group, token_scores: Sequence[TokenScores]) -> list[ScorerResult]:
    """One result per episode, from one TokenScores per rollout of the group."""
    remaining = iter(token_scores)
    return [
        ScorerResult(token_scores=tuple(next(remaining) for _ in episode.rollouts))
        for episode in group.episodes
    ]


def scatter(values: np.ndarray, rollout: Rollout) -> np.ndarray:
    """[sampled, ...] -> [L, ...], with zeros at the other positions."""
    scattered = np.zeros((len(rollout.tokens), *values.shape[1:]), values.dtype)
    scattered[rollout.mask] = values
    return scattered
