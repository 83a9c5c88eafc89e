"""The OpenAPI 3.1 description of the server, made of its request and reply bodies."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.json_schema import models_json_schema

from millrace.serving.api.bodies import ChatBody, CompletionBody
from millrace.serving.api.reading import Body
from millrace.serving.api.responses import ResponsesBody
from millrace.serving.api.score import ScoreBody


class ApiReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Health(ApiReply):
    status: Literal["ok", "degraded", "down"]
    engines: int  # configured
    serving: int  # ready

    @classmethod
    def of(cls, *, serving: int, engines: int) -> "Health":
        status = "ok" if serving == engines else "degraded" if serving else "down"
        return cls(status=status, engines=engines, serving=serving)


def _reply(name: str, /, **fields: Any) -> Any:
    """The body of a reply, as a pydantic model; (type, default) is an optional field."""
    given: dict[str, Any] = {
        key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()
    }
    return create_model(name, __base__=ApiReply, **given)


ModelEntry = _reply("ModelEntry", id=str, object=Literal["model"], created=int, owned_by=str)
ModelList = _reply("ModelList", object=Literal["list"], data=list[ModelEntry])
UsageReply = _reply("UsageReply", prompt_tokens=int, completion_tokens=int, total_tokens=int)
CalledFunction = _reply("CalledFunction", name=str, arguments=str)  # arguments as JSON
ToolCallEntry = _reply("ToolCallEntry", id=str, type=Literal["function"], function=CalledFunction)
AssistantMessage = _reply(
    "AssistantMessage",
    role=Literal["assistant"],
    content=str | None,
    refusal=None,
    tool_calls=(list[ToolCallEntry], []),
)
_TOP = {"token": str, "logprob": float, "bytes": list[int]}
TopLogprob = _reply("TopLogprob", **_TOP)
TokenLogprob = _reply("TokenLogprob", **_TOP, top_logprobs=list[TopLogprob])
ChatLogprobs = _reply("ChatLogprobs", content=list[TokenLogprob], refusal=None)
ChatChoice = _reply(
    "ChatChoice",
    index=int,
    message=AssistantMessage,
    logprobs=ChatLogprobs | None,
    finish_reason=Literal["stop", "length", "tool_calls"],
)
_HEAD = {"id": str, "created": int, "model": str, "usage": UsageReply}
ChatCompletion = _reply(
    "ChatCompletion", **_HEAD, object=Literal["chat.completion"], choices=list[ChatChoice]
)
TextLogprobs = _reply(
    "TextLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],  # null for the first token of an echoed prompt
    text_offset=list[int],
    top_logprobs=list[dict[str, float] | None] | None,
)
TextChoice = _reply(
    "TextChoice",
    index=int,
    text=str,
    logprobs=TextLogprobs | None,
    token_ids=(list[int], []),  # as the next, with return_token_ids
    versions=(list[int], []),  # that sampled each token
    finish_reason=Literal["stop", "length"],
)
TextCompletion = _reply(
    "TextCompletion", **_HEAD, object=Literal["text_completion"], choices=list[TextChoice]
)
OutputText = _reply(
    "OutputText",
    type=Literal["output_text"],
    text=str,
    annotations=list[Any],
    logprobs=list[TokenLogprob],
)
OutputMessage = _reply(
    "OutputMessage",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    status=Literal["completed", "incomplete"],
    content=list[OutputText],
)
OutputCall = _reply(
    "OutputCall",
    id=str,
    type=Literal["function_call"],
    status=Literal["completed"],
    call_id=str,
    name=str,
    arguments=str,  # JSON
)
ResponsesUsage = _reply(
    "ResponsesUsage",
    input_tokens=int,
    input_tokens_details=dict[str, int],
    output_tokens=int,
    output_tokens_details=dict[str, int],
    total_tokens=int,
)
ResponsesReply = _reply(
    "ResponsesReply",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    error=None,
    incomplete_details=dict[str, str] | None,
    instructions=str | None,
    max_output_tokens=int | None,
    metadata=dict[str, Any],
    model=str,
    output=list[OutputMessage | OutputCall],
    parallel_tool_calls=bool,
    previous_response_id=None,
    store=Literal[False],
    temperature=float,
    text=dict[str, Any],
    tool_choice=str | dict[str, str],
    tools=list[dict[str, Any]],
    top_p=float,
    truncation=Literal["disabled"],
    usage=ResponsesUsage,
)
SequenceScores = _reply(  # base64, see score.py
    "SequenceScores", logprobs=str, top_ids=str, top_logprobs=str, version=int | None
)
ScoreReply = _reply(
    "ScoreReply", vocabulary=str, num_tokens=int, max_context=int, sequences=list[SequenceScores]
)
ErrorDetail = _reply("ErrorDetail", message=str, type=str, param=str | None, code=str | None)
ErrorReply = _reply("ErrorReply", error=ErrorDetail)

JSON = "application/json"
STREAM = "text/event-stream"
_SCHEMA = "#/components/schemas/{model}"
Post = tuple[str, type[Body], type[ApiReply], str]
_POSTS: tuple[Post, ...] = (
    ("/v1/chat/completions", ChatBody, ChatCompletion, "Messages in, a message out."),
    ("/v1/completions", CompletionBody, TextCompletion, "Text in, the following text out."),
    ("/v1/responses", ResponsesBody, ResponsesReply, "Items in, items out; nothing is stored."),
)
_SCORE: Post = ("/score", ScoreBody, ScoreReply, "Logprobs of given tokens.")
_REFUSALS = {
    "400": "The request is invalid; the message says why.",
    "401": "The key is missing or wrong.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json, or is compressed.",
    "421": "Without a key, the Host header must name this machine or an allowed host.",
    "429": "Too many requests; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "An engine failed.",
}


def describe(*, needs_key: bool, scores: bool = False) -> dict[str, Any]:
    posts = (*_POSTS, _SCORE) if scores else _POSTS
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": "1"},
        "paths": {**_gets(needs_key), **{row[0]: _post(*row[1:]) for row in posts}},
        "security": [{"key": []}] if needs_key else [],
        "components": {
            "schemas": _schemas(posts),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}} if needs_key else {},
        },
    }


def _gets(needs_key: bool) -> dict[str, Any]:
    """Describe the GET routes. /health needs no key."""
    refusals = _refusals("401", "429") if needs_key else _refusals("421", "429")
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    health = {"200": _content(Health), "503": _content(Health)}
    described = {"description": "This description.", "content": {JSON: {"schema": {}}}}
    metrics = {"description": "For Prometheus.", "content": {"text/plain": {}}}
    answers = {"/openapi.json": described, "/metrics": metrics, "/v1/models": _content(ModelList)}
    model = {"200": _content(ModelEntry), **refusals, **_refusals("404")}
    return {
        "/health": {"get": {"security": [], "responses": health}},
        **{path: {"get": {"responses": {"200": row, **refusals}}} for path, row in answers.items()},
        "/v1/models/{name}": {"get": {"parameters": [name], "responses": model}},
    }


def _post(body: type[Body], reply: type[ApiReply], summary: str) -> dict[str, Any]:
    answered = _content(reply)
    if "stream" in body.model_fields:
        answered["content"][STREAM] = {"schema": {}}  # one object per event, then [DONE]
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {JSON: {"schema": _reference(body)}}},
            "responses": {"200": answered, **_refusals(*_REFUSALS)},
        }
    }


def _refusals(*statuses: str) -> dict[str, Any]:
    error = _content(ErrorReply)
    return {status: {**error, "description": _REFUSALS[status]} for status in statuses}


def _content(reply: type[ApiReply]) -> dict[str, Any]:
    return {"description": reply.__name__, "content": {JSON: {"schema": _reference(reply)}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMA.format(model=model.__name__)}


def _schemas(posts: Sequence[Post]) -> dict[str, Any]:
    described = [model for _, body, reply, _ in posts for model in (body, reply)]
    described += [Health, ModelEntry, ModelList, ErrorReply]
    models = [(model, "validation") for model in described]
    _, schema = models_json_schema(models, ref_template=_SCHEMA)  # pyright: ignore
    return schema["$defs"]
