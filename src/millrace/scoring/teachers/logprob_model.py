"""What teachers and references share: a scorer of logprobs, and the checks of its model.

L = tokens of a rollout.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

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
from millrace.scoring.model_process import ModelHandle, ModelScorer
from millrace.scoring.scorer_type import RunInfo


class LogprobModel(ModelHandle, Protocol):
    """A model that computes the logprobs of given tokens, in a local process or on a server."""

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises ScoreError."""
        ...


@dataclass(kw_only=True, eq=False)
class LogprobScorer(ModelScorer[LogprobModel]):
    """Scores sampled tokens by the logprobs of a model. Runs on the controller's event loop."""

    timeout_s: float
    max_context: int | None  # longest sequence; None = the model refuses longer ones itself

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
        if self.max_context is not None and longest > self.max_context:
            raise ScoreError(
                f"Teacher {self.name!r} reads at most {self.max_context} tokens, and group"
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
    check_top_k(num_top, num_tokens=smallest, name=name)


def check_top_k(num_top: int, *, num_tokens: int, name: str) -> None:
    """`num_tokens`: ids that both the model and the policy have."""
    if num_top >= num_tokens:
        raise ConfigError(
            f"Scorer {name!r} knows {num_tokens} tokens, and top_k = {num_top}; lower top_k."
        )
