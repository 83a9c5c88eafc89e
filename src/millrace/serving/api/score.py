"""/score: tokens in, how likely each of them is out; by processes that read and never write.

    POST  {"passages": [{"tokens": [9, 4, 7, 1], "ranges": [[2, 4]], "temperature": 1.0,
           "top_k": 2}]}
    200   {"vocabulary": "...", "num_tokens": 151669, "max_context": 40960, "passages":
           [{"logprobs": "...", "top_ids": "...", "top_logprobs": "...", "version": null}]}

Ranges say which tokens are judged, each given all before it. Arrays come as base64 of their
little-endian numbers, float32 and int32, row by row: a teacher may say many about each token, and
who learns from it has other things to do than reading digits. Without passages the answer says what
is served, so that a client can tell whether token ids mean the same here.

Promise: a passage is read in one forward pass, so by one version. Runs on the server's event loop.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from millrace.core.protocols import OnCompletion, OnTokens
from millrace.core.records import Completion, Request
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.scoring.teachers.process import TeacherProcess
from millrace.serving.api.bodies import Body, Number, TokenIds
from millrace.serving.api.errors import ApiError

MAX_TOP = 1024
Place = Annotated[int, Field(strict=True, ge=1)]
Range = Annotated[tuple[Place, Place], Field(strict=False)]  # JSON has lists for it


class PassageBody(Body):
    tokens: TokenIds
    ranges: Annotated[list[Range], Field(min_length=1)]  # from, and up to
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)] = 0

    @model_validator(mode="after")
    def _lie_within(self) -> "PassageBody":
        last = 1
        for begin, end in self.ranges:
            if not last <= begin < end <= len(self.tokens):
                raise ValueError(
                    f"range [{begin}, {end}] must lie behind the one before it and within the"
                    f" {len(self.tokens)} tokens, of which the first cannot be judged"
                )
            last = end
        return self

    def passage(self) -> ScoreRequest:
        return ScoreRequest(
            tokens=np.asarray(self.tokens, np.int32),
            positions=np.concatenate([np.arange(*each, dtype=np.int32) for each in self.ranges]),
            temperature=self.temperature,
            top_k=self.top_k,
        )


class ScoreBody(Body):
    """Passages that begin alike are read together."""

    passages: list[PassageBody]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """What is served."""

    vocabulary: str  # see vocabulary_checksum
    num_tokens: int  # ids from 0 on that mean something
    max_context: int


class Readers:
    """Several processes with the same model: the one with the fewest passages is asked."""

    def __init__(
        self, processes: Sequence[TeacherProcess], *, model: ReadModel, timeout_s: float
    ) -> None:
        self._processes = list(processes)
        self._num_passages = [0] * len(processes)  # in flight
        self._model = model
        self._timeout_s = timeout_s

    async def answer(self, body: ScoreBody) -> dict[str, Any]:
        self._check(body)
        told = await self._read([each.passage() for each in body.passages])
        return {
            "vocabulary": self._model.vocabulary,
            "num_tokens": self._model.num_tokens,
            "max_context": self._model.max_context,
            "passages": [_answer(logprobs) for logprobs in told],
        }

    async def _read(self, passages: list[ScoreRequest]) -> list[TokenLogprobs]:
        if not passages:
            return []
        index = min(range(len(self._processes)), key=self._num_passages.__getitem__)
        self._num_passages[index] += len(passages)
        try:
            process = self._processes[index]
            return await process.score(passages, timeout_s=self._timeout_s)
        finally:
            self._num_passages[index] -= len(passages)

    def _check(self, body: ScoreBody) -> None:
        for number, passage in enumerate(body.passages):
            if passage.ranges[-1][1] > self._model.max_context:
                raise ApiError(
                    f"Passage {number} is to be read up to token {passage.ranges[-1][1]}, but the"
                    f" context holds {self._model.max_context}; shorten it.",
                    code="context_length_exceeded",
                )
            if max(passage.tokens) >= self._model.num_tokens:
                raise ApiError(
                    f"Passage {number} has token {max(passage.tokens)}, but the model knows"
                    f" {self._model.num_tokens}; use its own tokenizer."
                )


class NoEngine:
    """Stands where a server has processes that read and none that write."""

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        raise ApiError(
            "This server scores and does not generate: it has no engines.",
            status=404,
            kind="not_found_error",
        )


def _answer(told: TokenLogprobs) -> dict[str, Any]:
    return {
        "logprobs": _encoded(told.logprobs, "<f4"),
        "top_ids": _encoded(told.top_ids, "<i4"),
        "top_logprobs": _encoded(told.top_logprobs, "<f4"),
        "version": told.version,
    }


def _encoded(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")
