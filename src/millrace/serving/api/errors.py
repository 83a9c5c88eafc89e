"""What goes wrong with a request, in the form that clients of the OpenAI API understand."""

import json
from typing import Any, Literal

from aiohttp import web

from millrace.core.errors import EngineLost, EnginesDown, MillraceError, TaskError, WorkerError

Kind = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
]


COME_AGAIN_S = 5  # while an engine is started


class ApiError(MillraceError):
    """A request that gets no answer but this: one sentence, and the field it is about."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: Kind = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind: Kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> web.Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return json_response(self.body(), status=self.status, headers=headers)


def as_api_error(error: MillraceError) -> ApiError:
    """What the client is told of an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TaskError):  # this request cannot be served; others can
        return ApiError(str(error))
    if isinstance(error, EnginesDown):
        return ApiError(
            str(error),
            status=503,
            kind="server_error",
            code="no_engine",
            retry_after_s=COME_AGAIN_S,
        )
    # Tracebacks and log tails of a worker are for who runs the server, not for its clients.
    what = "The engine failed." if isinstance(error, WorkerError | EngineLost) else str(error)
    return ApiError(what, status=503, kind="server_error", code="engine_failed")


def json_response(body: Any, *, status: int = 200, headers: Any = None) -> web.Response:
    # NaN and infinity are no JSON: a bug shows here and not in the client.
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")
