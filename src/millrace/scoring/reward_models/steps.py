"""Cuts rollouts into steps: at a delimiter, at each turn, or before a surprising token.

Promise: steps consist of the policy's own tokens, which are never encoded again. Tokens fed one by
one give the same steps as all at once. Pure, except for decoding with the tokenizer.

The end of a step is the index of its last token, within the turn, or for step_ends() within the
rollout.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from millrace.config.section import NonEmptyStr, PositiveInt
from millrace.core.plugins import build_plugin, check_exactly_one, plugin
from millrace.core.records import Rollout

# The first tokens of a slice may decode differently than in context (half a character, no space).
_TAIL_MARGIN = 4


class StepCutter(Protocol):
    """Cuts one turn while its tokens arrive."""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        """Return the ends of the steps that these tokens complete."""
        ...

    def finish(self) -> list[int]:
        """Finish the turn. Returns the end of its last step, unless feed() returned it."""
        ...


class Steps(Protocol):
    def cutter(self, tokenizer: Any) -> StepCutter: ...


@plugin
class ByDelimiter:
    """A step ends with the token that completes the delimiter. A step without text is joined to the
    next one, or at the end of a turn to the one before."""

    delimiter: NonEmptyStr = "\n\n"

    def cutter(self, tokenizer: Any) -> StepCutter:
        return _DelimiterCutter(self.delimiter, tokenizer=tokenizer)


@plugin
class ByTurn:
    """Each turn is one step."""

    def cutter(self, tokenizer: Any) -> StepCutter:
        return _SurprisalCutter(math.inf, min_tokens=1)


@plugin
class ByEntropy:
    """A step begins with a token whose surprisal, in nats, reaches the threshold. The surprisal is
    minus the logprob of the sampled token, as the engine reports it: after temperature and
    truncation. It is a one-sample estimate of the entropy, so a single token may be surprising
    where the policy was confident, and the other way round."""

    threshold: float | None = None
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Threshold as a quantile of the turn's own surprisals, which is known when the turn ends."""
    min_tokens: PositiveInt = 4
    """Minimum length of a step; surprising tokens within it are ignored."""

    def __post_init__(self) -> None:
        check_exactly_one(
            "steps by entropy need a limit", threshold=self.threshold, quantile=self.quantile
        )

    def cutter(self, tokenizer: Any) -> StepCutter:
        if self.threshold is not None:
            return _SurprisalCutter(self.threshold, min_tokens=self.min_tokens)
        assert self.quantile is not None
        return _QuantileCutter(self.quantile, min_tokens=self.min_tokens)


STEPS: dict[str, type] = {"delimiter": ByDelimiter, "turn": ByTurn, "entropy": ByEntropy}


def build_steps(table: Mapping[str, Any], *, section: str) -> Steps:
    settings = {("type" if key == "by" else key): value for key, value in table.items()}
    return build_plugin(settings, builtins=STEPS, default="delimiter", section=section)


def step_ends(rollout: Rollout, *, steps: Steps, tokenizer: Any) -> list[int]:
    """Return the ends of all steps of a rollout, as positions in it."""
    ends: list[int] = []
    padded = np.concatenate([[False], rollout.mask, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)).tolist()  # begin and stop of each run of sampled tokens
    for begin, stop in zip(edges[::2], edges[1::2], strict=True):
        cutter = steps.cutter(tokenizer)
        found = cutter.feed(
            rollout.tokens[begin:stop].tolist(), rollout.engine_logprobs[begin:stop].tolist()
        )
        ends += [begin + end for end in (*found, *cutter.finish())]
    return ends


class _DelimiterCutter:
    def __init__(self, delimiter: str, *, tokenizer: Any) -> None:
        self._delimiter = delimiter
        self._decode = _plain_decode(tokenizer)
        # A token decodes to at least one byte, so a delimiter spans at most this many tokens.
        self._reach = len(delimiter.encode()) + _TAIL_MARGIN
        self._tokens: list[int] = []
        self._begin = 0  # first token of the current step
        self._unsearched = 0  # first token after the last delimiter

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        # The search for a delimiter keeps special tokens: the delimiter may be one.
        text = self._decode([*self._tail(), *tokens], skip_special_tokens=False)
        if self._delimiter not in text:
            self._tokens += tokens
            return []
        ends: list[int] = []
        for token in tokens:
            self._tokens.append(token)
            if self._delimiter not in self._decode(self._tail(), skip_special_tokens=False):
                continue
            self._unsearched = len(self._tokens)
            if self._has_text():
                ends.append(len(self._tokens) - 1)
                self._begin = len(self._tokens)
        return ends

    def finish(self) -> list[int]:
        # A turn without text is still one step: its tokens were sampled.
        is_step = self._has_text() or (self._begin == 0 and self._tokens)
        return [len(self._tokens) - 1] if is_step else []

    def _tail(self) -> list[int]:
        """Return the tokens that a delimiter at the end can span."""
        return self._tokens[max(self._unsearched, len(self._tokens) - self._reach) :]

    def _has_text(self) -> bool:
        text = self._decode(self._tokens[self._begin :], skip_special_tokens=True)
        return bool(text.replace(self._delimiter, "").strip())


def _plain_decode(tokenizer: Any) -> Callable[..., str]:
    # Called for every token; the wrapper of transformers takes ten times as long.
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return fast.decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


@dataclass(slots=True, eq=False)
class _SurprisalCutter:
    threshold: float
    min_tokens: int
    _num_tokens: int = 0
    _begin: int = 0

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        ends: list[int] = []
        for logprob in logprobs:
            is_long = self._num_tokens - self._begin >= self.min_tokens
            if is_long and -logprob >= self.threshold:
                ends.append(self._num_tokens - 1)
                self._begin = self._num_tokens
            self._num_tokens += 1
        return ends

    def finish(self) -> list[int]:
        is_long = self._num_tokens - self._begin >= self.min_tokens
        is_step = is_long or (self._begin == 0 and self._num_tokens > 0)
        return [self._num_tokens - 1] if is_step else []


@dataclass(slots=True, eq=False)
class _QuantileCutter:
    """Cuts when the turn ends, because only then the quantile is known."""

    quantile: float
    min_tokens: int
    _logprobs: list[float] = field(default_factory=list[float])

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        self._logprobs += logprobs
        return []

    def finish(self) -> list[int]:
        if not self._logprobs:
            return []
        threshold = float(np.quantile(-np.array(self._logprobs), self.quantile))
        cutter = _SurprisalCutter(threshold, min_tokens=self.min_tokens)
        return [*cutter.feed([], self._logprobs), *cutter.finish()]
