"""A teacher on a server: the /score route of `millrace serve MODEL --scorers N`.

Promise: the server returns what a local teacher process would return for the same tokens. Every
answer carries a checksum of the server's vocabulary, because another model may be served at the
same address later. The first check happens before anything is trained.

Runs on the controller's event loop.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from millrace.core.errors import ConfigError
from millrace.core.records import ScoreRequest, TokenLogprobs
from millrace.scoring.services.endpoint import Endpoint
from millrace.scoring.teachers.process import check_top_k

MAX_TOKENS = 262_144  # per HTTP request
MAX_NUMBERS = 4_000_000  # per answer
MAX_ANSWER_BYTES = 64 * 2**20


class _EncodedLogprobs(msgspec.Struct, frozen=True):
    """TokenLogprobs with its arrays as little-endian bytes, which are base64 in JSON."""

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    version: int | None


class _Answer(msgspec.Struct, frozen=True):
    vocabulary: str
    num_tokens: int
    max_context: int
    sequences: list[_EncodedLogprobs]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RemoteTeacher:
    name: str
    endpoint: Endpoint
    vocabulary: str  # checksum of the policy's
    vocab_size: int  # of the policy
    num_top: int

    num_lost = 0  # the server restarts its own processes
    max_context = None  # the server refuses longer sequences

    async def start(self) -> None:
        """Raises ConfigError if the model does not fit, ScoreError if there is no answer."""
        await self.endpoint.start()
        answer = await self._post([])
        num_tokens = min(answer.num_tokens, self.vocab_size)
        check_top_k(self.num_top, num_tokens=num_tokens, name=self.name)

    async def close(self) -> None:
        await self.endpoint.close()

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises as Endpoint.post does. The endpoint has its own timeout."""
        parts = list(_split(requests))
        answers = await asyncio.gather(*(self._post(part) for part in parts))
        return [
            self._decode(encoded, request)
            for answer, part in zip(answers, parts, strict=True)
            for encoded, request in zip(answer.sequences, part, strict=True)
        ]

    async def _post(self, requests: Sequence[ScoreRequest]) -> _Answer:
        body = await self.endpoint.post({"sequences": [_body(request) for request in requests]})
        try:
            answer = msgspec.convert(body, _Answer)
        except msgspec.ValidationError as error:
            raise self.endpoint.unusable(f"sent an invalid answer: {error}") from None
        if answer.vocabulary != self.vocabulary:
            raise ConfigError(
                f"Scorer {self.name!r}: the tokenizer of the model at its url differs from that of"
                " the policy, so its logprobs would belong to other tokens; serve a model with the"
                " same tokenizer."
            )
        if len(answer.sequences) != len(requests):
            counts = f"{len(answer.sequences)} sequences instead of {len(requests)}"
            raise self.endpoint.unusable(f"answered for {counts}")
        return answer

    def _decode(self, encoded: _EncodedLogprobs, request: ScoreRequest) -> TokenLogprobs:
        num, top = len(request.positions), request.top_k
        logprobs = self._array(encoded.logprobs, "<f4", num)
        top_ids = self._array(encoded.top_ids, "<i4", num * top)
        top_logprobs = self._array(encoded.top_logprobs, "<f4", num * top)
        if not (np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()):
            raise self.endpoint.unusable("answered with logprobs that are not finite")
        if ((top_ids < 0) | (top_ids >= self.vocab_size)).any():
            raise self.endpoint.unusable("answered with tokens that the policy does not have")
        return TokenLogprobs(
            logprobs=logprobs,
            top_ids=top_ids.reshape(num, top),
            top_logprobs=top_logprobs.reshape(num, top),
            version=encoded.version,
        )

    def _array(self, data: bytes, dtype: str, size: int) -> np.ndarray:
        if len(data) != 4 * size:
            raise self.endpoint.unusable(f"answered with {len(data)} bytes instead of {4 * size}")
        return np.frombuffer(data, dtype)


def _body(request: ScoreRequest) -> dict[str, Any]:
    breaks = np.flatnonzero(np.diff(request.positions) != 1) + 1
    runs = np.split(request.positions, breaks)
    return {
        "tokens": request.tokens[: int(request.positions[-1]) + 1].tolist(),
        "ranges": [[int(run[0]), int(run[-1]) + 1] for run in runs],
        "temperature": request.temperature,
        "top_k": request.top_k,
    }


def _split(requests: Sequence[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
    """Split into HTTP requests within MAX_TOKENS and MAX_NUMBERS; each has at least one."""
    part: list[ScoreRequest] = []
    tokens = numbers = 0
    for request in requests:
        answered = len(request.positions) * (1 + 2 * request.top_k)
        is_full = tokens + len(request.tokens) > MAX_TOKENS or numbers + answered > MAX_NUMBERS
        if part and is_full:
            yield part
            part, tokens, numbers = [], 0, 0
        part.append(request)
        tokens += len(request.tokens)
        numbers += answered
    if part:
        yield part
