"""A teacher on another machine: `millrace serve MODEL --scorers N` there, asked through /score.

Promise: what it says is what a teacher process here would say about the same tokens. That token ids
mean the same to it is checked before anything is trained, and with every answer: another model may
be served at the same address after a while.

Runs on the controller's event loop.
"""

import asyncio
import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.scoring.services.endpoint import Endpoint

MAX_TOKENS = 262_144  # of one request
MAX_NUMBERS = 4_000_000  # of one answer
MAX_ANSWER_BYTES = 64 * 2**20


class _Told(msgspec.Struct, frozen=True):
    logprobs: str
    top_ids: str
    top_logprobs: str
    version: int | None


class _Answer(msgspec.Struct, frozen=True):
    vocabulary: str
    num_tokens: int
    max_context: int
    passages: list[_Told]


class RemoteTeacher:
    def __init__(
        self, name: str, *, endpoint: Endpoint, vocabulary: str, num_known: int, num_top: int
    ) -> None:
        """`vocabulary`: the checksum of the policy's; `num_known`: token ids it has a row for."""
        self.name = name
        self.num_lost = 0  # its processes are the server's business
        self._endpoint = endpoint
        self._vocabulary = vocabulary
        self._num_known = num_known
        self._num_top = num_top

    async def start(self) -> None:
        """Raises ConfigError if it is no teacher for this policy, and ScoreError if it is not
        there."""
        await self._endpoint.start()
        served = await self._ask([])
        smallest = min(served.num_tokens, self._num_known)
        if self._num_top >= smallest:
            raise ConfigError(
                f"Scorer {self.name!r} knows {smallest} tokens, and top_k = {self._num_top};"
                " lower that."
            )

    async def close(self) -> None:
        await self._endpoint.close()

    async def score(
        self, passages: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises as Endpoint.post does; that has a timeout of its own."""
        parts = list(_parts(passages))
        answers = await asyncio.gather(*(self._ask(part) for part in parts))
        return [
            self._token_logprobs(told, passage)
            for answer, part in zip(answers, parts, strict=True)
            for told, passage in zip(answer.passages, part, strict=True)
        ]

    async def _ask(self, passages: Sequence[ScoreRequest]) -> _Answer:
        found = await self._endpoint.post({"passages": [_body(each) for each in passages]})
        try:
            answer = msgspec.convert(found, _Answer)
        except msgspec.ValidationError as error:
            raise self._endpoint.unusable(f"answered with something else: {error}") from None
        if answer.vocabulary != self._vocabulary:
            raise ConfigError(
                f"Scorer {self.name!r}: the model at its url has another tokenizer than the policy,"
                " so its judgement of tokens would be of other tokens; serve one with the same."
            )
        if len(answer.passages) != len(passages):
            words = f"answered about {len(answer.passages)} passages of {len(passages)}"
            raise self._endpoint.unusable(words)
        return answer

    def _token_logprobs(self, told: _Told, passage: ScoreRequest) -> TokenLogprobs:
        num, top = len(passage.positions), passage.top_k
        logprobs = self._array(told.logprobs, "<f4", num)
        top_ids = self._array(told.top_ids, "<i4", num * top)
        top_logprobs = self._array(told.top_logprobs, "<f4", num * top)
        if not (np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()):
            raise self._endpoint.unusable("answered with logprobs that are not finite")
        if ((top_ids < 0) | (top_ids >= self._num_known)).any():
            raise self._endpoint.unusable("answered with tokens that the policy does not have")
        return TokenLogprobs(
            logprobs=logprobs,
            top_ids=top_ids.reshape(num, top),
            top_logprobs=top_logprobs.reshape(num, top),
            version=told.version,
        )

    def _array(self, text: str, dtype: str, size: int) -> np.ndarray:
        try:
            array = np.frombuffer(base64.b64decode(text, validate=True), dtype)
        except (binascii.Error, ValueError):
            raise self._endpoint.unusable("answered with an array that is none") from None
        if len(array) != size:
            raise self._endpoint.unusable(f"answered with {len(array)} numbers instead of {size}")
        return array


def _body(passage: ScoreRequest) -> dict[str, Any]:
    breaks = np.flatnonzero(np.diff(passage.positions) != 1) + 1
    runs = np.split(passage.positions, breaks)
    return {
        "tokens": passage.tokens[: int(passage.positions[-1]) + 1].tolist(),
        "ranges": [[int(run[0]), int(run[-1]) + 1] for run in runs],
        "temperature": passage.temperature,
        "top_k": passage.top_k,
    }


def _parts(passages: Sequence[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
    """In their order, as many to a request as it and its answer hold; one at least."""
    part: list[ScoreRequest] = []
    tokens = numbers = 0
    for passage in passages:
        answered = len(passage.positions) * (1 + 2 * passage.top_k)
        is_full = tokens + len(passage.tokens) > MAX_TOKENS or numbers + answered > MAX_NUMBERS
        if part and is_full:
            yield part
            part, tokens, numbers = [], 0, 0
        part.append(passage)
        tokens += len(passage.tokens)
        numbers += answered
    if part:
        yield part
