"""Executes the requests of the training API: once, in the order of their numbers, and again after a
crash if their effects were lost with it.

Promise: a request is on disk before it is executed, and its result before its future is ready. A
model is its newest snapshot and the requests after it, which a restarted server executes again. A
snapshot is written when the passes since the last one have taken SNAPSHOT_SHARE times as long as
writing it, so snapshots and recovery take a bounded share of the time.

Runs on the server's event loop.
"""

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from millrace.core.errors import CheckpointError, TaskError
from millrace.serving.api.errors import ApiError
from millrace.serving.tinker.computing import TrainingThread
from millrace.serving.tinker.request_log import AcceptedRequest, AuditLog, RequestLog, Result
from millrace.serving.tinker.tenants import RequestFuture, Tenant, TenantModel, Work, outcome
from millrace.training.adapters.requests import ENDED

SNAPSHOT_SHARE = 10.0  # seconds of passes for each second of writing snapshots
_CHANGING = ("create_model", "forward_backward", "optim_step", "load_weights")  # a model
_log = logging.getLogger(__name__)


class RequestExecutor:
    def __init__(
        self, folder: Path, *, log: RequestLog, thread: TrainingThread, audit: AuditLog
    ) -> None:
        """`folder`: of snapshots. MODEL/N has the effects of all requests before number N."""
        self._folder, self._requests, self._thread, self._audit = folder, log, thread, audit

    async def submit(
        self,
        tenant: Tenant,
        operation: str,
        owner: str,
        seq_id: int,
        body: bytes,
        work: Work,
        *,
        tokens: int = 0,
        num_reserved: int = 0,
    ) -> str:
        """The id of the future of the work, which comes after earlier requests of its model. A
        repeated request is neither executed nor counted. `num_reserved`: further tokens of the
        quota, which the work settles."""
        futures, key = tenant.futures, (owner, seq_id)
        if key in futures.ids:
            return await futures.accepted(futures.ids[key])
        request = tenant.restored.pop(key, None)
        if request is None:
            if (dropped := futures.make_room()) is not None:
                self._requests.forget(dropped)
            if tokens:
                tenant.quota.take(tokens, num_reserved=num_reserved)
            id = uuid.uuid4().hex
            request = AcceptedRequest(
                id=id, operation=operation, owner=owner, seq_id=seq_id, body=body
            )
            self._audit.write(tenant.name, operation, about=owner, tokens=tokens)
            on_disk = asyncio.ensure_future(self._requests.accept(tenant.name, request))
        else:
            tenant.quota.take(0, num_reserved=num_reserved, is_checked=False)
            on_disk = asyncio.ensure_future(asyncio.sleep(0))
        task = asyncio.create_task(self._run(tenant, request, work, on_disk))
        futures.add(request.id, RequestFuture(key, on_disk, task))
        return await futures.accepted(request.id)

    async def _run(
        self, tenant: Tenant, request: AcceptedRequest, work: Work, on_disk: asyncio.Future[None]
    ) -> Result:
        await asyncio.shield(on_disk)
        model = tenant.models.get(request.owner)
        turn = contextlib.nullcontext()
        if model is not None and request.seq_id >= model.next_seq:  # not in its snapshot
            turn = model.turn(request.seq_id)
        async with turn:
            has_ended = model is not None and model.has_ended
            result = await outcome(_refused() if has_ended else work(request.id))
            is_error = isinstance(result, dict) and "error" in result
            if request.result is not None:  # the client may have it
                if is_error and result != request.result:
                    _log.error("request %s could not be repeated: %s", request.id, result)
                return request.result
            changes = request.operation in _CHANGING and not is_error
            await self._requests.finish(request.id, result, keeps_body=changes)
            if model is not None and changes:
                # A saved state may be deleted as soon as the client has the result.
                now = request.operation == "load_weights"
                await self._snapshot(request.owner, model, next_seq=request.seq_id + 1, now=now)
            return result

    async def restore(
        self, tenant: Tenant, submit_again: Callable[[Tenant, AcceptedRequest], Awaitable[None]]
    ) -> None:
        """Give a tenant what it had in an earlier process. `submit_again` submits a request whose
        effects are lost."""
        record = await asyncio.to_thread(self._requests.read, tenant.name)
        tenant.sessions.update((id, []) for id in record.sessions)
        tenant.samplers.update(record.samplers)
        for request in record.requests:
            tenant.restored[request.key] = request
            model = tenant.models.get(request.owner)
            is_saved = model is not None and request.seq_id < model.next_seq
            if request.body is not None and not is_saved:
                # If its model or sampler cannot be restored, its client learns it when it asks.
                with contextlib.suppress(ApiError):
                    await submit_again(tenant, request)
            elif (result := request.result) is not None:
                known = (request.operation, *request.key, b"", partial(_known, result))
                await self.submit(tenant, *known)

    async def create_adapter(
        self, tenant: str, id: str, model: TenantModel, *, seed: int | None
    ) -> None:
        """A new one, or that of the newest snapshot of the model."""
        found = [(int(path.name), path) for path in (self._folder / id).glob("[0-9]*")]
        model.next_seq, folder = max(found, default=(1, None))

        def create(adapters: Any) -> None:
            # Its session may have ended while it waited. remove() then found no adapter, and
            # nothing would free one that is created now.
            if model.has_ended:
                raise TaskError(ENDED)
            adapters.create(id, model.shape, seed=seed)
            if folder is not None:
                adapters.load(id, folder, optimizer=True)

        await self._thread.run(tenant, 0, create)

    async def _snapshot(self, id: str, model: TenantModel, *, next_seq: int, now: bool) -> None:
        due_s = SNAPSHOT_SHARE * model.save_s * self._thread.num_models
        if not now and self._thread.busy_s - model.saved_at_s < due_s:
            return
        folder = self._folder / id / str(next_seq)

        def save(adapters: Any) -> float:
            began_s = time.monotonic()
            if id in adapters.owned:  # otherwise its session has ended
                adapters.save(id, folder, optimizer=True, gradient=True, about={})
                for other in folder.parent.iterdir():
                    if other != folder:
                        shutil.rmtree(other)
            return time.monotonic() - began_s

        try:
            model.save_s = await self._thread.run_next(save)
            await self._requests.cover(id, next_seq=next_seq)
        except CheckpointError as error:  # the requests since the last snapshot are kept
            _log.warning("%s", error)
        model.saved_at_s = self._thread.busy_s

    async def remove(self, session: str, models: Sequence[str]) -> None:
        """A session has ended."""
        await self._requests.end_session(session, models)
        for id in models:
            await self._thread.run_next(lambda adapters, id=id: adapters.owned.pop(id, None))
            await asyncio.to_thread(shutil.rmtree, self._folder / id, ignore_errors=True)


async def _known(result: Result, _id: str) -> Result:
    return result


async def _refused() -> Result:
    raise TaskError(ENDED)
