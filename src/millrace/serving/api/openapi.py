"""The OpenAPI 3.1 description of the server, made of its request bodies and replies."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from millrace.serving.api import replies
from millrace.serving.api.bodies import Body, ChatBody, CompletionBody
from millrace.serving.api.score import ScoreBody

JSON = "application/json"
STREAM = "text/event-stream"
_SCHEMA = "#/components/schemas/{model}"
Post = tuple[str, type[Body], type[replies.ApiReply], str]
_POSTS: tuple[Post, ...] = (
    ("/v1/chat/completions", ChatBody, replies.ChatCompletion, "Messages in, a message out."),
    ("/v1/completions", CompletionBody, replies.TextCompletion, "Text in, the following text out."),
)
_SCORE: Post = ("/score", ScoreBody, replies.ScoreReply, "Logprobs of given tokens.")
_REFUSALS = {
    "400": "The request is invalid; the message says why.",
    "401": "The key is missing or wrong.",
    "404": "The model does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many requests; Retry-After says when to try again.",
    "500": "The server failed.",
    "503": "An engine failed.",
}


def describe(*, needs_key: bool, scores: bool = False) -> dict[str, Any]:
    posts = (*_POSTS, _SCORE) if scores else _POSTS
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": "1"},
        "paths": {**_gets(needs_key), **{path: _post(*row) for path, *row in posts}},
        "security": [{"key": []}] if needs_key else [],
        "components": {
            "schemas": _schemas(posts),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}} if needs_key else {},
        },
    }


def _gets(needs_key: bool) -> dict[str, Any]:
    """Describe the GET routes. /health needs no key."""
    refusals = _refusals("401", "429") if needs_key else _refusals("429")
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    health = {"200": _content(replies.Health), "503": _content(replies.Health)}
    described = {"200": {"description": "This description.", "content": {JSON: {"schema": {}}}}}
    metrics = {"200": {"description": "For Prometheus.", "content": {"text/plain": {}}}}
    return {
        "/health": {"get": {"security": [], "responses": health}},
        "/openapi.json": {"get": {"responses": {**described, **refusals}}},
        "/metrics": {"get": {"responses": {**metrics, **refusals}}},
        "/v1/models": {"get": {"responses": {"200": _content(replies.ModelList), **refusals}}},
        "/v1/models/{name}": {
            "get": {
                "parameters": [name],
                "responses": {"200": _content(replies.ModelEntry), **refusals, **_refusals("404")},
            }
        },
    }


def _post(body: type[Body], reply: type[replies.ApiReply], summary: str) -> dict[str, Any]:
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
    error = _content(replies.ErrorReply)
    return {status: {**error, "description": _REFUSALS[status]} for status in statuses}


def _content(reply: type[replies.ApiReply]) -> dict[str, Any]:
    return {"description": reply.__name__, "content": {JSON: {"schema": _reference(reply)}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMA.format(model=model.__name__)}


def _schemas(posts: Sequence[Post]) -> dict[str, Any]:
    described = [model for _, body, reply, _ in posts for model in (body, reply)]
    described += [replies.Health, replies.ModelEntry, replies.ModelList, replies.ErrorReply]
    models = [(model, "validation") for model in described]
    _, schema = models_json_schema(models, ref_template=_SCHEMA)  # pyright: ignore
    return schema["$defs"]
