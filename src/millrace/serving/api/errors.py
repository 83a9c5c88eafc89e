"""Errors of requests in the format of the OpenAI API."""

import json
from typing import Any

from aiohttp import web

from millrace.core.errors import (
    EngineLost,
    EnginesDown,
    MillraceError,
    ScoreError,
    TaskError,
    WorkerError,
)

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 5  # while an engine starts


class ApiError(MillraceError):
    """The error response to a request: one sentence, and the field that caused it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": _KINDS.get(self.status, default)}
        return {"error": {**error, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        elif self.status == 429:  # waiting does not help; the clients of OpenAI and Tinker obey
            headers["X-Should-Retry"] = "false"
        return json_response(self.body(), status=self.status, headers=headers)


def as_api_error(error: MillraceError) -> ApiError:
    """Convert an internal error to the error that the client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TaskError):  # a mistake in this request
        return ApiError(str(error))
    if isinstance(error, EnginesDown):
        return ApiError(str(error), status=503, code="no_engine", retry_after_s=RETRY_AFTER_S)
    # Clients do not see the worker's traceback and log; the operator of the server does.
    is_lost = isinstance(error, WorkerError | EngineLost | ScoreError)
    message = "The engine failed." if is_lost else str(error)
    return ApiError(message, status=503, code="engine_failed")


def json_response(body: Any, *, status: int = 200, headers: Any = None) -> web.Response:
    # NaN and infinity are not JSON; fail here, not in the client.
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")
