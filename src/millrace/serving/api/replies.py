"""Replies of the server, field by field, for its description at /openapi.json.

Promise: each reply of an endpoint is one of these; tests check the endpoints against them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ApiReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Health(ApiReply):
    status: Literal["ok", "degraded", "down"]
    engines: int  # configured
    serving: int  # ready


class ModelEntry(ApiReply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(ApiReply):
    object: Literal["list"]
    data: list[ModelEntry]


class UsageReply(ApiReply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(ApiReply):
    name: str
    arguments: str  # JSON


class ToolCallEntry(ApiReply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ApiReply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallEntry] = []


class TokenLogprob(ApiReply):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(ApiReply):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ApiReply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionReply(ApiReply):
    id: str
    created: int
    model: str
    usage: UsageReply


class ChatCompletion(CompletionReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(ApiReply):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None


class TextChoice(ApiReply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    token_ids: list[int] = []  # as the next, with return_token_ids
    versions: list[int] = []  # that sampled each token
    finish_reason: Literal["stop", "length"]


class TextCompletion(CompletionReply):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class SequenceScores(ApiReply):
    logprobs: str  # base64 like the next two, see score.py
    top_ids: str
    top_logprobs: str
    version: int | None


class ScoreReply(ApiReply):
    vocabulary: str
    num_tokens: int
    max_context: int
    sequences: list[SequenceScores]


class ErrorDetail(ApiReply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ApiReply):
    error: ErrorDetail
