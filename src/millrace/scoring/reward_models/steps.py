"""Where the steps of a rollout end: at a delimiter, with each turn, or before a surprising token.

Promise: steps are cut between the policy's own tokens, which are never encoded again; tokens fed
one by one give the same steps as all at once. Pure: knows a tokenizer to decode with, no more.

A step's end is its last token, counted within the turn, or within the rollout for step_ends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from millrace.core.plugins import build_plugin
from millrace.core.records import Rollout

# Tokens at the cut of a tail may decode differently than in place (half a character, a lost space).
_TAIL_MARGIN = 4


class Cutter(Protocol):
    """Cuts one turn, as its tokens come."""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        """Ends of the steps that are finished now."""
        ...

    def finish(self) -> list[int]:
        """The turn is over: the end of its last step, unless that was reported before."""
        ...


class Steps(Protocol):
    """A way to cut turns into steps."""

    def cutter(self, tokenizer: Any) -> Cutter: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ByDelimiter:
    """A step ends with the token that completes the delimiter. One without any text of its own
    belongs to the next, or at the end of a turn to the last."""

    delimiter: str = "\n\n"

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or not self.delimiter:
            raise ValueError(f"delimiter = {self.delimiter!r} must be a text that is not empty")

    def cutter(self, tokenizer: Any) -> Cutter:
        return _DelimiterCutter(self.delimiter, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByTurn:
    """A turn is a step."""

    def cutter(self, tokenizer: Any) -> Cutter:
        return _TurnCutter()


@dataclass(frozen=True, kw_only=True, slots=True)
class ByEntropy:
    """A step begins with a token whose surprisal, in nats, reaches the threshold.

    The surprisal is minus the logprob of the token that was sampled, as the engine reports it:
    after temperature and truncation. That is one draw of what the entropy is the mean of, so a
    single token may be surprising where the policy was sure, and the other way round.
    """

    threshold: float | None = None
    quantile: float | None = None
    """Or the threshold is this quantile of the turn's own surprisals; known when the turn ends."""
    min_tokens: int = 4
    """Of a step; spikes within it are passed over."""

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.quantile is None):
            raise ValueError("steps by entropy need a threshold or a quantile; set one of the two")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(f"quantile = {self.quantile!r} must be between 0 and 1")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens = {self.min_tokens!r} must be at least 1")

    def cutter(self, tokenizer: Any) -> Cutter:
        if self.threshold is not None:
            return _SpikeCutter(self.threshold, min_tokens=self.min_tokens)
        assert self.quantile is not None
        return _QuantileCutter(self.quantile, min_tokens=self.min_tokens)


STEPS: dict[str, type] = {"delimiter": ByDelimiter, "turn": ByTurn, "entropy": ByEntropy}


def build_steps(table: Mapping[str, Any], *, section: str) -> Steps:
    """What a table like {by = "delimiter", delimiter = "\\n"} describes."""
    settings = {("type" if key == "by" else key): value for key, value in table.items()}
    return build_plugin(settings, builtins=STEPS, default="delimiter", section=section)


def step_ends(rollout: Rollout, *, steps: Steps, tokenizer: Any) -> list[int]:
    """Of all steps of a rollout, as positions in it."""
    ends: list[int] = []
    for begin, stop in turns_of(rollout.mask):
        cutter = steps.cutter(tokenizer)
        found = cutter.feed(
            rollout.tokens[begin:stop].tolist(), rollout.engine_logprobs[begin:stop].tolist()
        )
        ends += [begin + end for end in (*found, *cutter.finish())]
    return ends


def turns_of(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """[begin, stop) of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


class _DelimiterCutter:
    def __init__(self, delimiter: str, *, tokenizer: Any) -> None:
        self._delimiter = delimiter
        self._decode = _plain_decode(tokenizer)
        # A token decodes to at least one byte, so no delimiter reaches back further than this.
        self._reach = len(delimiter.encode()) + _TAIL_MARGIN
        self._tokens: list[int] = []
        self._begin = 0  # of the step
        self._unsearched = 0  # behind the last delimiter, which may have ended no step

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        if self._delimiter not in self._text([*self._tail(), *tokens]):
            self._tokens += tokens
            return []
        ends: list[int] = []
        for token in tokens:
            self._tokens.append(token)
            if self._delimiter not in self._text(self._tail()):
                continue
            self._unsearched = len(self._tokens)
            if self._has_text():
                ends.append(len(self._tokens) - 1)
                self._begin = len(self._tokens)
        return ends

    def finish(self) -> list[int]:
        # A turn without any text is one step all the same: its tokens were sampled, too.
        is_step = self._has_text() or (self._begin == 0 and self._tokens)
        return [len(self._tokens) - 1] if is_step else []

    def _tail(self) -> list[int]:
        """Where a delimiter may end with the next token, or has ended with the last."""
        return self._tokens[max(self._unsearched, len(self._tokens) - self._reach) :]

    def _has_text(self) -> bool:
        text = self._text(self._tokens[self._begin :], skip_special_tokens=True)
        return bool(text.replace(self._delimiter, "").strip())

    def _text(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        # Special tokens stay in where a delimiter is looked for: it may well be one.
        return self._decode(tokens, skip_special_tokens=skip_special_tokens)


def _plain_decode(tokenizer: Any) -> Callable[..., str]:
    """Of a fast tokenizer, without what transformers does around it, which takes ten times as
    long: it is called for every token."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return fast.decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


class _TurnCutter:
    def __init__(self) -> None:
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        self._num_tokens += len(tokens)
        return []

    def finish(self) -> list[int]:
        return [self._num_tokens - 1] if self._num_tokens else []


class _SpikeCutter:
    def __init__(self, threshold: float, *, min_tokens: int) -> None:
        self._threshold = threshold
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._begin = 0

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        ends: list[int] = []
        for logprob in logprobs:
            is_long = self._num_tokens - self._begin >= self._min_tokens
            if is_long and -logprob >= self._threshold:
                ends.append(self._num_tokens - 1)
                self._begin = self._num_tokens
            self._num_tokens += 1
        return ends

    def finish(self) -> list[int]:
        is_long = self._num_tokens - self._begin >= self._min_tokens
        is_step = is_long or (self._begin == 0 and self._num_tokens > 0)
        return [self._num_tokens - 1] if is_step else []


class _QuantileCutter:
    """Waits for the whole turn."""

    def __init__(self, quantile: float, *, min_tokens: int) -> None:
        self._quantile = quantile
        self._min_tokens = min_tokens
        self._logprobs: list[float] = []

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        self._logprobs += logprobs
        return []

    def finish(self) -> list[int]:
        if not self._logprobs:
            return []
        threshold = float(np.quantile(-np.array(self._logprobs), self._quantile))
        cutter = _SpikeCutter(threshold, min_tokens=self._min_tokens)
        return [*cutter.feed([], self._logprobs), *cutter.finish()]
