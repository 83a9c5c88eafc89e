"""Request bodies and results of the Tinker API, as version 0.36 of its client sends and reads them.

Small bodies are JSON; passes over data, their results and samples are protobuf. Unknown fields and
values that are not supported are refused, so nothing that a client requests is silently ignored.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from millrace.core.records import Completion
from millrace.serving.api.bodies import (
    MAX_MESSAGES,
    Count,
    Number,
    NumTop,
    StopText,
    Temperature,
    TokenId,
    TokenIds,
    TopP,
)
from millrace.serving.api.errors import ApiError
from millrace.serving.api.reading import Body
from millrace.serving.tinker import protobuf
from millrace.serving.tinker.protobuf import integers, mapping, message, messages, write
from millrace.training.adapters.requests import (
    AdamSettings,
    AdapterPass,
    AdapterShape,
    TrainingDatum,
)

_FLOAT32, _INT64, _INT32 = 1, 2, 3  # data types of tensors
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}

Id = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
SeqId = Annotated[int, Field(ge=0, lt=2**53)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Ttl = Annotated[Count, Field(lt=2**32)]  # seconds; a date after the year 9999 cannot be written
# An empty list would disable the end token, which always stops here.
Stops = Annotated[list[StopText | TokenId], Field(min_length=1, max_length=16, fail_fast=True)]
Rate = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class TinkerBody(Body):
    type: str | None = None
    user_metadata: dict[str, Any] | None = None  # accepted and not kept

    def as_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True, exclude={"user_metadata"}).encode()


class SessionBody(TinkerBody):
    session_id: Id


class LoraBody(Body):
    rank: Count = 32
    seed: Seed | None = None
    train_unembed: bool = True  # accepted; the head is never adapted
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def shape(self) -> AdapterShape:
        return AdapterShape(rank=self.rank, attention=self.train_attn, mlp=self.train_mlp)


class CreateModelBody(SessionBody):
    model_seq_id: SeqId
    base_model: str
    lora_config: LoraBody = LoraBody()
    optimizer_config: dict[Literal["type"], Literal["adamw"]] | None = None


class ModelBody(TinkerBody):
    model_id: Id


class TurnBody(ModelBody):
    seq_id: SeqId


class AdamBody(Body):
    learning_rate: Rate = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Rate = 0.0

    def settings(self) -> AdamSettings:
        return AdamSettings(**self.model_dump())


class OptimStepBody(TurnBody):
    adam_params: AdamBody


class SaveBody(TurnBody):
    path: Name | None = None  # None = only for a sampler of this session
    sampling_session_seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None  # None = it is kept until it is deleted
    overwrite: bool = False


class LoadBody(TurnBody):
    path: str
    optimizer: bool
    weights_access_token: None = None


class CreateSamplerBody(SessionBody):
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class PathBody(Body):
    tinker_path: str


class FutureBody(Body):
    request_id: Id
    allow_metadata_only: bool = False


class TokenChunk(Body):
    tokens: TokenIds
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(Body):
    chunks: Annotated[
        list[TokenChunk], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]


class SamplingBody(Body):
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: TopP = 1.0


class SampleBody(TinkerBody):
    sampling_session_id: Id
    seq_id: SeqId
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Count | None = None
    topk_sample_logprobs: NumTop = 0
    topk_prompt_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: Literal[False] | None = None

    @property
    def num_tokens(self) -> int:  # P
        return sum(len(chunk.tokens) for chunk in self.prompt.chunks)

    @property
    def tokens(self) -> np.ndarray:  # [P] int32
        return np.array([token for chunk in self.prompt.chunks for token in chunk.tokens], np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassBody(AdapterPass):
    seq_id: int
    body: bytes  # as the client sent it


def read_pass(body: bytes) -> PassBody:
    fields = protobuf.read(body)
    settings: dict[str, float] = {}
    for name, value in mapping(fields, 7).items():
        if len(number := message(value, 1)) != 8:
            raise ApiError(f"loss_fn_config has {name!r}, which is not a number.")
        settings[name] = struct.unpack("<d", number)[0]
    data = [_datum(protobuf.read(datum)) for datum in messages(fields, 3)]
    seq_id = integers(fields, 2)[-1:]
    if not data or not seq_id or seq_id[0] >= 2**53:
        raise ApiError("The request needs a seq_id from 1 to 2^53 and at least one datum.")
    return PassBody(
        model_id=message(fields, 1).decode(errors="replace"),
        seq_id=seq_id[0],
        body=body,
        data=data,
        loss=message(fields, 4).decode(errors="replace"),
        settings=settings,
        backward=not any(integers(fields, 6)),
    )


def _datum(fields: protobuf.Fields) -> TrainingDatum:
    chunks = [protobuf.read(chunk) for chunk in messages(fields, 1)]
    if any(1 not in chunk for chunk in chunks):
        raise ApiError("A datum has images or audio; this server trains on text.")
    texts = [message(protobuf.read(message(chunk, 1)), 1) for chunk in chunks]
    inputs = {name: _tensor(name, tensor) for name, tensor in mapping(fields, 2).items()}
    tokens = _array("model_input", b"".join(texts), _INT32).astype(np.int64)
    return TrainingDatum(tokens=tokens, inputs=inputs)


def _tensor(name: str, fields: protobuf.Fields) -> np.ndarray:
    if 2 in fields:
        raise ApiError(f"{name!r} is a sparse tensor; send it dense.")
    values = _array(name, message(fields, 1), sum(integers(fields, 3)))
    shape = integers(fields, 4) or [values.size]
    try:
        return values.reshape(shape)
    except (ValueError, OverflowError):  # of another size, or with too many or too large dimensions
        raise ApiError(
            f"{name!r:.80} has {values.size} values, but the shape {shape!s:.80}."
        ) from None


def _array(name: str, data: bytes, dtype: int) -> np.ndarray:
    if dtype not in _DTYPES or len(data) % _DTYPES[dtype].itemsize:
        raise ApiError(f"{name!r} has {len(data)} bytes, which do not fit data type {dtype}.")
    return np.frombuffer(data, _DTYPES[dtype])


def pass_result(logprobs: Sequence[np.ndarray], loss: float) -> bytes:
    """A ForwardBackwardOutput: logprobs of the targets of each datum, and the summed loss."""
    fields: list[tuple[int, Any]] = [(1, "ArrayRecord")]
    for trailing, group in groupby(logprobs, key=lambda each: each.shape[1:]):
        own = [each.astype("<f4") for each in group]
        offsets = np.cumsum([0, *(each.nbytes for each in own)], dtype="<i8")
        data = b"".join(each.tobytes() for each in own)
        shape = b"".join(map(protobuf.write_varint, trailing))
        tensor = write([(1, data), (2, offsets.tobytes()), (3, _FLOAT32), (4, shape)])
        entry = write([(1, "logprobs"), (2, tensor)])
        fields.append((2, write([(1, "ArrayRecord"), (2, entry), (3, len(own))])))
    return write([*fields, (3, write([(1, "loss:sum"), (2, float(loss))]))])


def sample_result(completions: Sequence[Completion], prompt_logprobs: np.ndarray | None) -> bytes:
    """A SampleResponse. `prompt_logprobs` [P] float32: NaN where none was computed."""
    fields: list[tuple[int, Any]] = []
    for each in completions:
        tokens, logprobs = each.tokens.astype("<i4"), each.logprobs.astype("<f4")
        own: list[tuple[int, Any]] = [(1, int(each.finish == "length"))]
        own += [(2, tokens.tobytes()), (3, logprobs.tobytes())]
        if (top := each.top) is not None:
            ids, chances = top.ids.astype("<i4"), top.logprobs.astype("<f4")
            sizes = [(3, ids.shape[1]), (4, ids.shape[0])]
            own.append((4, write([(1, ids.tobytes()), (2, chances.tobytes()), *sizes])))
        fields.append((1, write(own)))
    if prompt_logprobs is not None:
        fields.append((2, prompt_logprobs.astype("<f4").tobytes()))
    return write(fields)
