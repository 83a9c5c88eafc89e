"""Cuts rollouts into steps: at a delimiter, at each turn, or before a surprising token. Reads the
values of steps, also while the rest of their sequence is still being generated.

Promise: steps consist of the policy's own tokens, which are never encoded again. Tokens fed one by
one give the same steps as all at once. Pure, except for decoding with the tokenizer.

The end of a step is the index of its last token, within the turn, or for step_ends() within the
rollout.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from millrace.cluster.messages import ReadSteps, StepReading, StepValues
from millrace.config.section import NonEmptyStr, PositiveInt
from millrace.core.errors import MillraceError
from millrace.core.plugins import build_plugin, check_exactly_one, plugin
from millrace.core.protocols import OnTokens
from millrace.core.records import CompletionChunk, Prompt, Request, Rollout
from millrace.scoring.model_process import ModelProcess

# The first tokens of a slice may decode differently than in context (half a character, no space).
_TAIL_MARGIN = 4
MAX_STORED = 65_536  # step values


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
        return _SurprisalCutter(math.inf, 1)


@plugin
class ByEntropy:
    """A step begins with a token whose surprisal, in nats, reaches the threshold. The surprisal is
    minus the logprob of the sampled token, as the engine reports it: after temperature and
    truncation. It is a one-sample estimate of the entropy, so a single token may be surprising
    where the policy was confident, and the other way round."""

    threshold: float | None = None
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None  # threshold, among the turn's own
    min_tokens: PositiveInt = 4  # minimum length of a step; surprising tokens within it are ignored

    def __post_init__(self) -> None:
        check_exactly_one(
            "steps by entropy need a limit", threshold=self.threshold, quantile=self.quantile
        )

    def cutter(self, tokenizer: Any) -> StepCutter:
        return _SurprisalCutter(self.threshold, self.min_tokens, self.quantile)


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
        # Called for every token; the wrapper of transformers takes ten times as long.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        slow = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._decode: Callable[..., str] = slow if fast is None else fast.decode
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


@dataclass(slots=True, eq=False)
class _SurprisalCutter:
    threshold: float | None  # None = a quantile, which is known when the turn ends
    min_tokens: int
    quantile: float | None = None
    _logprobs: list[float] = field(default_factory=list[float])  # for the quantile
    _num_tokens: int = 0
    _begin: int = 0

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
        if self.threshold is None:
            self._logprobs += logprobs
            return []
        ends: list[int] = []
        for logprob in logprobs:
            is_long = self._num_tokens - self._begin >= self.min_tokens
            if is_long and -logprob >= self.threshold:
                ends.append(self._num_tokens - 1)
                self._begin = self._num_tokens
            self._num_tokens += 1
        return ends

    def finish(self) -> list[int]:
        ends: list[int] = []
        if self._logprobs:
            self.threshold = float(np.quantile(-np.array(self._logprobs), self.quantile or 0.0))
            ends = self.feed([], self._logprobs)
        is_long = self._num_tokens - self._begin >= self.min_tokens
        is_step = is_long or (self._begin == 0 and self._num_tokens > 0)
        return [*ends, self._num_tokens - 1] if is_step else ends


class RewardModelProcess(ModelProcess):
    ROLE = "Reward model"
    MODULE = "millrace.scoring.reward_models.worker"

    async def read(self, readings: Sequence[StepReading], *, timeout_s: float) -> list[list[float]]:
        """Return the values of the steps of each reading."""
        reply = await self.ask(ReadSteps(readings=list(readings)), timeout_s=timeout_s)
        assert isinstance(reply, StepValues)
        return reply.values


@dataclass(frozen=True, slots=True, eq=False)
class StepReader:
    process: RewardModelProcess
    tokenizer: Any  # of the policy
    takes_ids: bool  # the model gets the policy's tokens instead of text
    timeout_s: float

    async def read(
        self,
        tokens: np.ndarray,
        ends: Sequence[int],
        *,
        prompt: Prompt,
        num_prompt: int,
        num_known: int = 0,
        is_partial: bool = False,
    ) -> list[float]:
        """The values of all steps but the first `num_known`. `is_partial`: more steps follow."""
        if num_known == len(ends):
            return []
        if self.takes_ids:
            content: dict[str, Any] = {"tokens": tokens[: ends[-1] + 1], "ends": list(ends)}
        else:
            content = {"prompt": prompt, "pieces": self._pieces(tokens, ends, num_prompt)}
        reading = StepReading(**content, num_known=num_known, is_partial=is_partial)
        (values,) = await self.process.read([reading], timeout_s=self.timeout_s)
        return values

    def _pieces(self, tokens: np.ndarray, ends: Sequence[int], num_prompt: int) -> list[str]:
        bounds = [num_prompt, *(end + 1 for end in ends)]
        return [
            self.tokenizer.decode(
                tokens[begin:end].tolist(),
                skip_special_tokens=True,  # they mean nothing to another tokenizer
                clean_up_tokenization_spaces=False,
            )
            for begin, end in pairwise(bounds)
        ]


@dataclass(slots=True, eq=False)
class _StepStream:
    prompt: Prompt
    num_prompt: int
    cutter: StepCutter
    tokens: list[int]  # including the prompt
    held: list[int] = field(default_factory=list[int])  # ends of steps that wait for more tokens
    ends: list[int] = field(default_factory=list[int])  # of steps that were or will be read
    values: list[asyncio.Future[float]] = field(default_factory=list[asyncio.Future[float]])
    num_read: int = 0  # steps
    is_finished: bool = False
    is_failed: bool = False  # a call failed; the rest is not read ahead
    reading: asyncio.Task[None] | None = None


class ReadAhead:
    """Reads steps while their sequences are being generated. Runs on the controller's event loop.

    The value of a step depends only on the tokens up to its end, so values are stored by a digest
    of these tokens. A later lookup finds values that were read or are being read, or none.

    Each sequence has one call in flight; steps that finish meanwhile share the next call. Steps
    wait until `min_tokens` new tokens have arrived, because many small passes cost more than few.
    Bounds: MAX_STORED values, the oldest are dropped; a cancelled request leaves at most one call
    in flight.
    """

    def __init__(self, reader: StepReader, *, steps: Steps, min_tokens: int = 1) -> None:
        """`min_tokens`: new tokens between two calls, unless the sequence has finished."""
        self._min_tokens = min_tokens
        self._reader = reader
        self._steps = steps
        self._stored: OrderedDict[bytes, asyncio.Future[float]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def stream_callback(self, request: Request, *, prompt: Prompt) -> OnTokens:
        prompt_tokens = request.prompt.tolist()
        streams = [
            _StepStream(
                prompt=prompt,
                num_prompt=len(prompt_tokens),
                cutter=self._steps.cutter(self._reader.tokenizer),
                tokens=list(prompt_tokens),
            )
            for _ in range(request.n)
        ]
        return lambda chunk: self._on_tokens(streams[chunk.member], chunk)

    async def values(self, tokens: np.ndarray, ends: Sequence[int]) -> list[float]:
        """Return the values of the leading steps that were read ahead."""
        values: list[float] = []
        for end in ends:
            value = self._stored.get(_digest(tokens[: end + 1]))
            if value is None:
                break
            await asyncio.wait({value})
            if value.cancelled():
                break
            values.append(value.result())
        return values

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_tokens(self, stream: _StepStream, chunk: CompletionChunk) -> None:
        if stream.is_failed:
            return
        start = len(stream.tokens)
        stream.tokens += chunk.tokens.tolist()
        ends = stream.cutter.feed(stream.tokens[start:], chunk.logprobs.tolist())
        stream.is_finished = chunk.finish is not None
        if chunk.finish in ("stop", "length"):
            ends += stream.cutter.finish()
        stream.held += [stream.num_prompt + end for end in ends]
        last = stream.ends[-1] if stream.ends else stream.num_prompt - 1
        num_new = len(stream.tokens) - 1 - last
        if not stream.held or not (stream.is_finished or num_new >= self._min_tokens):
            return
        for end in stream.held:
            value: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            stream.ends.append(end)
            stream.values.append(value)
            self._stored[_digest(np.array(stream.tokens[: end + 1], np.int32))] = value
            if len(self._stored) > MAX_STORED:
                self._stored.popitem(last=False)
        stream.held.clear()
        if stream.reading is None and len(stream.ends) > stream.num_read:
            stream.reading = asyncio.create_task(self._read(stream))
            self._tasks.add(stream.reading)
            stream.reading.add_done_callback(self._tasks.discard)

    async def _read(self, stream: _StepStream) -> None:
        """Read all requested steps, including those that are requested meanwhile."""
        try:
            while stream.num_read < len(stream.ends):
                ends = list(stream.ends)
                values = await self._reader.read(
                    np.array(stream.tokens[: ends[-1] + 1], np.int32),
                    ends,
                    prompt=stream.prompt,
                    num_prompt=stream.num_prompt,
                    num_known=stream.num_read,
                    is_partial=not stream.is_finished,
                )
                for future, value in zip(stream.values[stream.num_read :], values, strict=False):
                    future.set_result(value)
                stream.num_read = len(ends)
            stream.reading = None
        except MillraceError:
            pass  # score() reads the steps again and raises the error then
        finally:
            stream.is_failed = stream.reading is not None
            for future in stream.values:
                future.cancel()  # no effect on futures that have a value


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).data, digest_size=16).digest()
