"""Steps are read as soon as they are finished, while the rest is still being generated.

What a step is worth depends on the tokens up to its end and on nothing else, so that is what values
are remembered by: whoever asks for a sequence later finds what was begun, or asks anew.

Runs on the controller's event loop. Of each sequence one call is under way; steps that finish
meanwhile go together in the next. Steps wait until some tokens have come together, because many
small passes cost more than few; once they are sent, they are answered. Bounds: MAX_REMEMBERED
values, the oldest are forgotten; a request that is given up leaves at most one call under way.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.core.errors import MillraceError
from millrace.core.protocols import OnTokens
from millrace.core.records import CompletionChunk, Prompt, Request
from millrace.scoring.reward_models.process import StepReader
from millrace.scoring.reward_models.steps import Cutter, Steps

MAX_REMEMBERED = 65_536


@dataclass(slots=True, eq=False)
class _Growing:
    """One completion of a request."""

    prompt: Prompt
    num_prompt: int
    cutter: Cutter
    tokens: list[int]  # with the prompt's
    held: list[int] = field(default_factory=list[int])  # ends of steps that wait for more of them
    ends: list[int] = field(default_factory=list[int])  # of those that are read, or will be at once
    answers: list[asyncio.Future[float]] = field(default_factory=list[asyncio.Future[float]])
    num_known: int = 0  # steps that were read
    is_over: bool = False
    is_lost: bool = False  # a call failed: nothing more of it is read ahead
    reading: asyncio.Task[None] | None = None


class ReadAhead:
    def __init__(
        self, reader: StepReader, *, steps: Steps, tokenizer: Any, min_tokens: int = 1
    ) -> None:
        """`min_tokens`: sampled from one call to the next, unless the sequence has ended."""
        self._min_tokens = min_tokens
        self._reader = reader
        self._steps = steps
        self._tokenizer = tokenizer
        self._remembered: OrderedDict[bytes, asyncio.Future[float]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, request: Request, *, prompt: Prompt) -> OnTokens:
        """Is told what the request's completions sample."""
        known = request.prompt.tolist()
        growing = [
            _Growing(
                prompt=prompt,
                num_prompt=len(known),
                cutter=self._steps.cutter(self._tokenizer),
                tokens=list(known),
            )
            for _ in range(request.n)
        ]
        return lambda piece: self._hear(growing[piece.member], piece)

    async def values(self, tokens: np.ndarray, ends: Sequence[int]) -> list[float]:
        """Of the first steps, as many as were begun."""
        values: list[float] = []
        for end in ends:
            answer = self._remembered.get(_key(tokens[: end + 1]))
            if answer is None:
                break
            await asyncio.wait({answer})
            if answer.cancelled():
                break
            values.append(answer.result())
        return values

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _hear(self, one: _Growing, piece: CompletionChunk) -> None:
        if one.is_lost:
            return
        begin = len(one.tokens)
        one.tokens += piece.tokens.tolist()
        ends = one.cutter.feed(one.tokens[begin:], piece.logprobs.tolist())
        one.is_over = piece.finish is not None
        if piece.finish in ("stop", "length"):
            ends += one.cutter.finish()
        one.held += [one.num_prompt + end for end in ends]
        last = one.ends[-1] if one.ends else one.num_prompt - 1
        num_new = len(one.tokens) - 1 - last
        if not one.held or not (one.is_over or num_new >= self._min_tokens):
            return
        for end in one.held:
            self._begin(one, end)
        one.held.clear()
        if one.reading is None and len(one.ends) > one.num_known:
            one.reading = asyncio.create_task(self._read(one))
            self._tasks.add(one.reading)
            one.reading.add_done_callback(self._tasks.discard)

    def _begin(self, one: _Growing, end: int) -> None:
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        one.ends.append(end)
        one.answers.append(answer)
        self._remembered[_key(np.array(one.tokens[: end + 1], np.int32))] = answer
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    async def _read(self, one: _Growing) -> None:
        """All that is unread, and then what has come meanwhile."""
        try:
            while one.num_known < len(one.ends):
                ends = list(one.ends)
                values = await self._reader.read(
                    np.array(one.tokens[: ends[-1] + 1], np.int32),
                    ends,
                    prompt=one.prompt,
                    num_prompt=one.num_prompt,
                    num_known=one.num_known,
                    goes_on=not one.is_over,
                )
                for answer, value in zip(one.answers[one.num_known :], values, strict=False):
                    answer.set_result(value)
                one.num_known = len(ends)
            one.reading = None
        except MillraceError:
            pass  # who wants its values asks again, and is told why
        finally:
            one.is_lost = one.reading is not None
            for answer in one.answers:
                answer.cancel()  # does nothing to those that have their value


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).data, digest_size=16).digest()
