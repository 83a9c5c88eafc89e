"""/score: the logprobs of given tokens, computed by teacher processes; see docs/how-to/serve.md.

Arrays are base64 of little-endian float32 and int32 in row-major order: with a large top_k, JSON
numbers would be slow to parse. No more are sent than RemoteTeacher reads. A request without
sequences returns the properties of the model, so that a client can check that token ids mean the
same. Promise: each sequence is read in one forward pass, so by one version. Runs on the server's
event loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from millrace.core.records import ScoreRequest, TokenLogprobs
from millrace.scoring.teachers.process import MAX_ANSWER_BYTES, MAX_SEQUENCES, TeacherProcess
from millrace.serving.api.bodies import Number, TokenIds
from millrace.serving.api.errors import ApiError
from millrace.serving.api.reading import Body

MAX_TOP = 1024
MAX_SENT = MAX_ANSWER_BYTES // 6  # numbers; one has 5.3 bytes of base64
Place = Annotated[int, Field(strict=True, ge=1)]
Range = Annotated[tuple[Place, Place], Field(strict=False)]  # a list in JSON


class SequenceBody(Body):
    tokens: TokenIds
    ranges: Annotated[
        list[Range], Field(min_length=1, fail_fast=True)
    ]  # [first, end) of scored tokens
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)] = 0

    @model_validator(mode="after")
    def _check_ranges(self) -> "SequenceBody":
        last = 1
        for begin, end in self.ranges:
            if not last <= begin < end <= len(self.tokens):
                raise ValueError(
                    f"range [{begin}, {end}] must follow the range before it and lie within the"
                    f" {len(self.tokens)} tokens; token 0 has no logprob"
                )
            last = end
        return self

    @property
    def num_scored(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def request(self) -> ScoreRequest:
        return ScoreRequest(
            tokens=np.asarray(self.tokens, np.int32),
            positions=np.concatenate([np.arange(*each, dtype=np.int32) for each in self.ranges]),
            temperature=self.temperature,
            top_k=self.top_k,
        )


class ScoreBody(Body):
    """Sequences with a common prefix are read together."""

    sequences: Annotated[list[SequenceBody], Field(max_length=MAX_SEQUENCES, fail_fast=True)]

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.sequences)


@dataclass(kw_only=True, eq=False)
class ScorePool:
    """Several processes with the same model. A request goes to the least loaded one."""

    processes: Sequence[TeacherProcess]
    vocabulary: str  # checksum, see vocabulary_checksum()
    num_tokens: int  # valid ids are below this
    max_context: int
    timeout_s: float

    def __post_init__(self) -> None:
        self._num_sequences = [0] * len(self.processes)  # in flight

    async def answer(self, body: ScoreBody) -> dict[str, Any]:
        requests = await asyncio.to_thread(self._requests, body)  # very many tokens take time
        scored = await self._score(requests) if requests else []
        model = {name: getattr(self, name) for name in ("vocabulary", "num_tokens", "max_context")}
        sequences = [
            {
                "logprobs": each.logprobs.astype("<f4", copy=False),
                "top_ids": each.top_ids.astype("<i4", copy=False),
                "top_logprobs": each.top_logprobs.astype("<f4", copy=False),
                "version": each.version,
            }
            for each in scored
        ]
        return {**model, "sequences": sequences}

    async def _score(self, requests: list[ScoreRequest]) -> list[TokenLogprobs]:
        index = min(range(len(self.processes)), key=self._num_sequences.__getitem__)
        self._num_sequences[index] += len(requests)
        try:
            return await self.processes[index].score(requests, timeout_s=self.timeout_s)
        finally:
            self._num_sequences[index] -= len(requests)

    def _requests(self, body: ScoreBody) -> list[ScoreRequest]:
        num_sent = 0
        for number, sequence in enumerate(body.sequences):
            end, highest = sequence.ranges[-1][1], max(sequence.tokens)
            if end > self.max_context:
                raise ApiError(
                    f"Sequence {number} is scored up to token {end}, but the context is limited to"
                    f" {self.max_context}; shorten it.",
                    code="context_length_exceeded",
                )
            if highest >= self.num_tokens:
                raise ApiError(
                    f"Sequence {number} has token {highest}, but the model knows"
                    f" {self.num_tokens}; use its own tokenizer."
                )
            num_sent += sequence.num_scored * (1 + 2 * sequence.top_k)
        if num_sent > MAX_SENT:
            raise ApiError(
                f"The answer would have {num_sent} numbers, but at most {MAX_SENT} are sent; lower"
                " top_k, or send several requests."
            )
        return [each.request() for each in body.sequences]
