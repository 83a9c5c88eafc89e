"""What one API key owns: sessions, models, samplers, futures, and the folder of its saved states.

Promise: the work of a request is done once for each key, and the work of a model in the order of
its numbers. Runs on the server's event loop.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millrace.core.errors import CheckpointError, MillraceError, TaskError, failure_text
from millrace.serving.api.errors import ApiError, as_api_error
from millrace.serving.clients import Client, TokenQuota
from millrace.serving.tinker.request_log import AcceptedRequest, RequestKey, Result
from millrace.training.adapters.requests import AdapterShape

MAX_FUTURES = 4096  # of a tenant; the oldest results are dropped
MAX_SESSIONS = 256  # of a tenant at a time
MAX_MODELS = 16  # likewise
MAX_SAMPLERS = 1024  # of a tenant; those that were used least recently are removed
MAX_UNSAVED = 32  # of these, samplers of unsaved weights
SILENT_S = 3600.0  # after the last heartbeat of a session, its models are freed
_ENDED_AT_ONCE = 4  # silent sessions that end when a session is created
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
    except Exception as error:  # noqa: BLE001 - a bug: logged here, hidden from clients
        _log.error("%s", failure_text("a request of the training API failed", error))
        return {"error": "The server failed.", "category": "server"}


@dataclass(eq=False, kw_only=True, slots=True)
class TenantModel:
    shape: AdapterShape
    used_s: float = field(default_factory=time.time)  # since 1970
    next_seq: int = 1
    saved_at_s: float = 0.0  # TrainingThread.busy_s when its snapshot was written
    save_s: float = 0.0  # that this took
    waiting: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])
    has_ended: bool = False  # its session has

    @contextlib.asynccontextmanager
    async def turn(self, seq_id: int) -> AsyncIterator[None]:
        """Wait until all requests with smaller numbers are done, or until the model ends."""
        if seq_id != self.next_seq:
            await self.waiting.setdefault(seq_id, asyncio.Event()).wait()
        try:
            yield
        finally:
            self.next_seq += 1
            if self.next_seq in self.waiting:
                self.waiting.pop(self.next_seq).set()

    def end(self) -> None:
        """Requests that wait for earlier ones would wait for ever: those may never come."""
        self.has_ended = True
        for turn in self.waiting.values():
            turn.set()
        self.waiting.clear()


class Tenant:
    def __init__(self, client: Client, folder: Path, quota: TokenQuota) -> None:
        """`folder`: of the saved states of all tenants."""
        self.client, self.quota = client, quota
        self.name = client.tenant
        self.futures = RequestFutures()
        self.restored: dict[RequestKey, AcceptedRequest] = {}  # of before a crash, to be submitted
        self.sessions: dict[str, list[str]] = {}  # their models, by id
        self.models: dict[str, TenantModel] = {}
        # By id, least recently used first: their adapters; None = the model itself.
        self.samplers: dict[str, Path | None] = {}
        self.folder = folder / client.tenant

    def session(self, id: str) -> list[str]:
        """The models of a session that has not ended."""
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

    def open_session(self, key: str | None = None) -> str:
        """Returns its id. A key always has the same session, also in a restarted server."""
        id = uuid.uuid4().hex
        if key is not None:
            id = hashlib.sha256(f"{self.name} {key}".encode(errors="replace")).hexdigest()[:32]
        if id not in self.sessions and len(self.sessions) >= MAX_SESSIONS:
            raise ApiError(
                f"You have {MAX_SESSIONS} open sessions; close other clients, or wait: a session"
                f" ends {SILENT_S:g} s after its last heartbeat.",
                status=429,
                code="too_many_sessions",
            )
        self.sessions.setdefault(id, [])
        return id

    def close_session(self, id: str) -> list[str]:
        """Returns the models of the session, which end with it."""
        models = self.session(id)
        del self.sessions[id]
        for model in models:
            if (ended := self.models.pop(model, None)) is not None:
                ended.end()
        for sampler in [each for each in self.samplers if each.startswith(f"{id}:")]:
            del self.samplers[sampler]
        return models

    def add_model(self, id: str, shape: AdapterShape, *, session: str) -> TenantModel:
        if len(self.models) >= MAX_MODELS:
            raise TaskError(f"You have {MAX_MODELS} models; end the sessions of old ones.")
        self.session(session).append(id)
        self.models[id] = TenantModel(shape=shape)
        return self.models[id]

    def sampler(self, id: str) -> Path | None:
        """The folder of its adapter, now the last used one; None = the model itself."""
        if id not in self.samplers:
            raise ApiError(f"Sampler {id!r:.80} does not exist; create a new one.", status=404)
        self.samplers[id] = self.samplers.pop(id)
        return self.samplers[id]

    def add_sampler(self, id: str, folder: Path | None) -> dict[str, Path | None]:
        """Returns those that were removed because there is no room, with their adapters."""
        self.samplers.pop(id, None)
        self.samplers[id] = folder
        unsaved = [id for id, own in self.samplers.items() if own and own.name == id]
        surplus = [*self.samplers][: max(0, len(self.samplers) - MAX_SAMPLERS)]
        return {old: self.samplers.pop(old) for old in {*unsaved[:-MAX_UNSAVED], *surplus}}

    def path_of(self, tinker_path: str) -> Path:
        """The folder of a saved state; it may not exist."""
        if (found := _PATH.fullmatch(tinker_path)) is None:
            raise ApiError(f"{tinker_path!r:.200} is not a path like tinker://MODEL/weights/NAME.")
        return self.folder.joinpath(*found.groups())


class SessionOrder:
    """The sessions of all tenants in the order of their last heartbeats, so that finding silent
    ones takes no longer if there are more."""

    def __init__(self) -> None:
        # By session, with the time of its last heartbeat; the longest silent are first.
        self._heard: OrderedDict[str, tuple[Tenant, float]] = OrderedDict()

    def hear(self, tenant: Tenant, id: str) -> None:
        """A session has begun, or has sent a heartbeat."""
        tenant.session(id)  # raises if it has ended
        self._heard[id] = tenant, time.monotonic()
        self._heard.move_to_end(id)

    def remove(self, id: str) -> None:
        self._heard.pop(id, None)

    def take_silent(self) -> Iterator[tuple[Tenant, str]]:
        """A few sessions that have been silent for too long; the next call yields others. Each is
        looked up when it is needed: it may end or be heard while the one before it is ended."""
        for _ in range(_ENDED_AT_ONCE):
            if not self._heard:
                return
            id, (tenant, heard_s) = next(iter(self._heard.items()))
            if time.monotonic() - heard_s <= SILENT_S:
                return
            self.remove(id)
            yield tenant, id
