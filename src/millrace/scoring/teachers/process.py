"""What teachers and references share: their settings, the process of their model, and their scorer.

L = tokens of a rollout.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from millrace.cluster.messages import ScoreTokens, StartTeacher, Swapped, SwapWeights, TokensScored
from millrace.config.section import Dtype, PositiveInt
from millrace.core.errors import ConfigError, ScoreError, WorkerError
from millrace.core.plugins import plugin
from millrace.core.records import (
    Group,
    Rollout,
    ScoreRequest,
    ScorerResult,
    Task,
    TokenLogprobs,
    TokenScores,
    WeightUpdate,
)
from millrace.models.directory import load_tokenizer, max_positions, text_config
from millrace.scoring.model_process import MODEL_CALLS, ModelHandle, ModelProcess, ModelScorer
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext

SWAP_ATTEMPTS = 2


class TeacherProcess(ModelProcess):
    """A self-teacher saves its weights in a file, which a restarted process loads."""

    ROLE = "Teacher"
    MODULE = "millrace.scoring.teachers.worker"
    max_context: int | None = None

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        reply = await self.ask(ScoreTokens(requests=list(requests)), timeout_s=timeout_s)
        assert isinstance(reply, TokensScored)
        return reply.logprobs

    async def swap(self, update: WeightUpdate) -> int:
        """Load an update, also into a restarted process. Returns the version held then, after
        which the update may be released."""
        for _ in range(SWAP_ATTEMPTS):
            with contextlib.suppress(WorkerError):  # the restart is counted
                reply = await self.ask_once(SwapWeights(update=update), timeout_s=None)
                assert isinstance(reply, Swapped)
                return reply.version
        return update.version  # both processes died; the next version will come


@plugin
class LogprobModelSettings:
    """How a process that computes logprobs is run. The fields are keys of [[scorers]]."""

    dtype: Dtype = "auto"
    """Data type of the model. "auto" is bfloat16 on CUDA and float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads."""
    pass_tokens: PositiveInt = 8192
    """Token budget of one forward pass. A longer sequence gets a pass of its own."""
    logprob_chunk: PositiveInt = 1024
    """Number of tokens whose logits are held in memory at once."""

    def call_settings(self, *, num_workers: int) -> CallSettings:
        """One call per group, because its rollouts share their prompt."""
        return replace(MODEL_CALLS, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """By default any task will do."""

    def process_settings(self) -> dict[str, Any]:
        """The fields of this class alone, without those of subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(LogprobModelSettings)}

    def make_process(
        self, name: str, *, model: str, context: ScorerContext, **self_teacher: Any
    ) -> TeacherProcess:
        """Build a process that is not started yet. `self_teacher`: more fields of StartTeacher."""
        config = context.run_info.config
        start = StartTeacher(
            config=config.model_dump(mode="json"),
            settings=self.process_settings(),
            device=config.placement.model(name),
            model_path=model,
            **self_teacher,
        )
        process = TeacherProcess(
            name,
            start=start,
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )
        text = text_config(model, trust_remote_code=config.model.trust_remote_code)
        limit = max_positions(text)
        process.max_context = limit if limit is not None else context.run_info.max_context
        return process


class LogprobModel(ModelHandle, Protocol):
    """A model that computes the logprobs of given tokens, in a local process or on a server."""

    @property
    def max_context(self) -> int | None:
        """Longest sequence; None if the model refuses longer ones itself."""
        ...

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises ScoreError."""
        ...


@dataclass(kw_only=True, eq=False)
class LogprobScorer(ModelScorer[LogprobModel]):
    """Scores sampled tokens by the logprobs of a model. Runs on the controller's event loop."""

    timeout_s: float
    token_scores_only = True

    async def _score(
        self,
        group: Group,
        requests: Sequence[ScoreRequest],
        *,
        to_scores: Callable[[TokenLogprobs, Rollout], TokenScores],
    ) -> list[ScorerResult]:
        """`requests` has one request per rollout of the group."""
        longest = max(len(request.inputs) for request in requests)
        limit = self.model.max_context
        if limit is not None and longest > limit:
            raise ScoreError(
                f"Teacher {self.name!r} reads at most {limit} tokens, and group"
                f" {group.number} has {longest}; lower engine.max_context or"
                " sampling.max_new_tokens."
            )
        logprobs = await self.model.score(requests, timeout_s=self.timeout_s)
        scores = iter([to_scores(*pair) for pair in zip(logprobs, group.rollouts, strict=True)])
        return [
            ScorerResult(token_scores=tuple(islice(scores, len(episode.rollouts))))
            for episode in group.episodes
        ]


def scatter(values: np.ndarray, rollout: Rollout) -> np.ndarray:
    """[sampled, ...] -> [L, ...], with zeros at the other positions."""
    scattered = np.zeros((len(rollout.tokens), *values.shape[1:]), values.dtype)
    scattered[rollout.mask] = values
    return scattered


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
    check_top_k(num_top, num_tokens=smallest, name=name)


def check_top_k(num_top: int, *, num_tokens: int, name: str) -> None:
    if num_top >= num_tokens:
        raise ConfigError(
            f"Scorer {name!r} knows {num_tokens} tokens, and top_k = {num_top}; lower top_k."
        )
