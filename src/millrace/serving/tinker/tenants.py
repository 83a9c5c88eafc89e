"""What one API key owns: sessions, models, samplers, futures, and the folder of its saved states.

Promise: the work of a request is done once for each key, and the work of a model in the order of
its numbers. Runs on the server's event loop.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from millrace.core.errors import CheckpointError, MillraceError
from millrace.serving.api.errors import ApiError, as_api_error
from millrace.serving.clients import Client
from millrace.serving.tinker.request_log import AcceptedRequest, RequestKey, Result
from millrace.serving.tinker.usage import TokenQuota
from millrace.training.adapters.requests import AdapterShape

MAX_FUTURES = 4096  # of a tenant; the oldest results are dropped
_PATH = re.compile(r"tinker://([\w-]+)/(weights|sampler_weights)/([\w-][\w.-]*)", re.ASCII)
_log = logging.getLogger(__name__)

Work = Callable[[str], Awaitable[Result]]  # gets the id of its future


@dataclass(frozen=True, slots=True, eq=False)
class RequestFuture:
    key: RequestKey
    on_disk: asyncio.Future[None]  # done when the request is
    task: asyncio.Task[Result]


class RequestFutures:
    def __init__(self) -> None:
        self.ids: dict[RequestKey, str] = {}
        self._futures: dict[str, RequestFuture] = {}  # the oldest first

    def make_room(self) -> str | None:
        """Drop the oldest result if there are too many; returns its id."""
        if len(self._futures) < MAX_FUTURES:
            return None
        old = next((id for id, future in self._futures.items() if future.task.done()), None)
        if old is None:
            message = f"{MAX_FUTURES} requests wait; try again later."
            raise ApiError(message, status=429, retry_after_s=1)
        del self.ids[self._futures.pop(old).key]
        return old

    def add(self, id: str, future: RequestFuture) -> None:
        self.ids[future.key], self._futures[id] = id, future

    async def accepted(self, id: str) -> str:
        """The id, when the request is on disk."""
        await asyncio.shield(self._futures[id].on_disk)
        return id

    async def result(self, id: str, *, timeout_s: float | None = None) -> Result | None:
        """None if it is not there in time."""
        if id not in self._futures:
            raise ApiError(
                f"Request {id!r:.80} is unknown: its session has ended, or its result is no longer"
                " kept.",
                status=404,
            )
        task = self._futures[id].task
        await asyncio.wait({task}, timeout=timeout_s)  # a client that leaves does not cancel it
        return task.result() if task.done() else None

    def cancel(self) -> None:
        for future in self._futures.values():
            future.task.cancel()


async def outcome(work: Awaitable[Result]) -> Result:
    try:
        return await work
    except MillraceError as error:
        is_user = isinstance(error, CheckpointError) or as_api_error(error).status < 500
        return {"error": str(as_api_error(error)), "category": "user" if is_user else "server"}
    except Exception:  # noqa: BLE001 - a bug: logged here, hidden from clients
        _log.exception("a request of the training API failed")
        return {"error": "The server failed.", "category": "server"}


@dataclass(eq=False, kw_only=True, slots=True)
class TenantModel:
    shape: AdapterShape
    used_s: float = field(default_factory=time.time)  # since 1970
    next_seq: int = 1
    saved_at_s: float = 0.0  # TrainingThread.busy_s when its snapshot was written
    save_s: float = 0.0  # that this took
    waiting: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])

    @contextlib.asynccontextmanager
    async def turn(self, seq_id: int) -> AsyncIterator[None]:
        """Wait until all requests with smaller numbers are done."""
        if seq_id != self.next_seq:
            await self.waiting.setdefault(seq_id, asyncio.Event()).wait()
        try:
            yield
        finally:
            self.next_seq += 1
            if self.next_seq in self.waiting:
                self.waiting.pop(self.next_seq).set()


@dataclass(eq=False, slots=True)
class TenantSession:
    heard_s: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list[str])


class Tenant:
    def __init__(self, client: Client, folder: Path, quota: TokenQuota) -> None:
        """`folder`: of the saved states of all tenants."""
        self.client, self.quota = client, quota
        self.name = client.tenant
        self.futures = RequestFutures()
        self.restored: dict[RequestKey, AcceptedRequest] = {}  # of before a crash, to be submitted
        self.sessions: dict[str, TenantSession] = {}
        self.models: dict[str, TenantModel] = {}
        self.samplers: dict[str, Path | None] = {}  # their adapters; None = the model itself
        self.folder = folder / client.tenant

    def session(self, id: str) -> TenantSession:
        if id not in self.sessions:  # 410 ends the heartbeats of a client
            raise ApiError(f"Session {id!r:.80} has ended; create a new client.", status=410)
        return self.sessions[id]

    def model(self, id: str) -> TenantModel:
        if id not in self.models:
            raise ApiError(
                f"Model {id!r:.80} does not exist: its session has ended; continue from its last"
                " saved state with"
                " create_training_client_from_state_with_optimizer().",
                status=404,
            )
        return self.models[id]

    def path_of(self, tinker_path: str) -> Path:
        """The folder of a saved state; it may not exist."""
        if (found := _PATH.fullmatch(tinker_path)) is None:
            raise ApiError(f"{tinker_path!r:.200} is not a path like tinker://MODEL/weights/NAME.")
        return self.folder.joinpath(*found.groups())
