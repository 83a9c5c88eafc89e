"""Reads the values of steps, also while the rest of their sequence is still being generated.

The value of a step depends only on the tokens up to its end, so values are stored by a digest of
these tokens. A later lookup finds values that were read or are being read, or none.

Runs on the controller's event loop. Each sequence has one call in flight; steps that finish
meanwhile share the next call. Steps wait until `min_tokens` new tokens have arrived, because many
small passes cost more than few. Bounds: MAX_STORED values, the oldest are dropped; a cancelled
request leaves at most one call in flight.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.cluster.messages import StepReading
from millrace.core.errors import MillraceError
from millrace.core.protocols import OnTokens
from millrace.core.records import CompletionChunk, Prompt, Request
from millrace.scoring.reward_models.process import RewardModelProcess
from millrace.scoring.reward_models.steps import StepCutter, Steps

MAX_STORED = 65_536


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
            self._request_value(stream, end)
        stream.held.clear()
        if stream.reading is None and len(stream.ends) > stream.num_read:
            stream.reading = asyncio.create_task(self._read(stream))
            self._tasks.add(stream.reading)
            stream.reading.add_done_callback(self._tasks.discard)

    def _request_value(self, stream: _StepStream, end: int) -> None:
        value: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        stream.ends.append(end)
        stream.values.append(value)
        self._stored[_digest(np.array(stream.tokens[: end + 1], np.int32))] = value
        if len(self._stored) > MAX_STORED:
            self._stored.popitem(last=False)

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
