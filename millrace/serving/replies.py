"""What the server answers, field by field, for its description at /openapi.json.

Promise: every reply of an endpoint is one of these; tests hold the endpoints to it.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Health(Reply):
    status: Literal["ok", "degraded", "down"]
    engines: int  # there should be,
    serving: int  # and that are up


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(Reply):
    name: str
    arguments: str  # JSON


class Call(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] = []


class TokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(Reply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None


class TextChoice(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Sampled(Reply):
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]
    text: str


class Generated(Reply):
    id: str
    seed: int
    completions: list[Sampled]


class ReadPassage(Reply):
    logprobs: str  # this and the next two: base64, see score.py
    top_ids: str
    top_logprobs: str
    version: int | None


class Scored(Reply):
    vocabulary: str
    num_tokens: int
    max_context: int
    passages: list[ReadPassage]


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorDetail
