"""The paths of the training API, and its start. Runs on the server's event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from millrace.config import EngineConfig
from millrace.serving.api.errors import ApiError, json_response
from millrace.serving.api.reading import Body
from millrace.serving.served_model import ServedModel
from millrace.serving.server import CLIENT, read_bytes, read_request
from millrace.serving.settings import ServeSettings
from millrace.serving.tinker import wire
from millrace.serving.tinker.adapter_slots import AdapterSlots
from millrace.serving.tinker.computing import TrainingThread
from millrace.serving.tinker.service import Reply, TrainingService
from millrace.serving.tinker.tenants import Tenant

NUM_SLOTS = 4  # adapters that engines hold at a time; each makes every pass slower
MAX_LISTED = 1000  # entries of one reply
POLL_S = 20.0  # that a request for a result waits, at most
_IDEMPOTENCY_HEADER = "X-Idempotency-Key"  # of a request that the client repeats
_PROTOBUF = "application/x-protobuf"
B = TypeVar("B", bound=Body)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRuntime:
    """What `--train` starts before the engines."""

    thread: TrainingThread
    slots: AdapterSlots
    engine: EngineConfig  # with places for adapters

    @staticmethod
    async def start(settings: ServeSettings) -> "TrainingRuntime | None":
        """Load the model that is trained; None without --train."""
        if (training := settings.training) is None:
            return None
        thread, engine = await TrainingThread.start(settings.config), settings.config.engine
        blank, rank = training.folder / "blank", training.max_rank
        await thread.run("", 0, lambda adapters: adapters.write_blank(blank, rank=rank))
        names = [f"training-{number}" for number in range(NUM_SLOTS)]
        adapters = {**engine.adapters, **dict.fromkeys(names, str(blank))}
        engine = engine.model_copy(update={"adapters": adapters})
        slots = AdapterSlots(names, max_users=settings.engines * engine.max_sequences)
        return TrainingRuntime(thread=thread, slots=slots, engine=engine)

    def add_to(self, app: web.Application, served: ServedModel, settings: ServeSettings) -> None:
        assert settings.training is not None
        service = TrainingService(
            served,
            self.thread,
            self.slots,
            settings=settings.training,
            model_path=settings.config.model.path,
        )
        # The client sizes its chunks of data, and a request has to hold one.
        chunk = {"fwdbwd_max_chunk_bytes_count": settings.limits.body_bytes // 2}
        add_routes(app, service, client_config=chunk, timeout_s=settings.limits.timeout_s)


class TrainingRoutes:
    """Adds paths to an app, each with the method of the service that answers it."""

    def __init__(self, app: web.Application, service: TrainingService, *, timeout_s: float) -> None:
        self._app, self._service, self._timeout_s = app, service, timeout_s

    async def _tenant(self, request: web.Request) -> Tenant:
        return await self._service.tenant(request[CLIENT])

    def post(
        self, path: str, kind: type[B], answer: Callable[[Tenant, B], Awaitable[Reply]]
    ) -> None:
        async def handle(request: web.Request) -> web.Response:
            body = await read_request(request, kind, timeout_s=self._timeout_s)
            return json_response(await answer(await self._tenant(request), body))

        self._app.router.add_post(f"/api/v1/{path}", handle)

    def plain(self, method: str, path: str, answer: Callable[..., Awaitable[Any]] | Reply) -> None:
        """A path whose body does not matter; variable parts of the path are arguments."""

        async def handle(request: web.Request) -> web.Response:
            if method == "POST":
                await read_bytes(request, timeout_s=self._timeout_s)
            if isinstance(answer, dict):
                return json_response(answer)
            reply = await answer(await self._tenant(request), *request.match_info.values())
            return web.Response(status=204) if reply is None else json_response(reply)

        self._app.router.add_route(method, f"/api/v1/{path}", handle)

    def listing(self, path: str, name: str, answer: Callable[..., Awaitable[list[Reply]]]) -> None:
        """A path that returns a part of a list, from `offset` and of at most `limit` entries."""

        async def handle(request: web.Request) -> web.Response:
            try:
                offset, limit = (int(request.query.get(key, "0")) for key in ("offset", "limit"))
            except ValueError:
                raise ApiError("limit and offset must be integers.") from None
            found = await answer(await self._tenant(request), *request.match_info.values())
            offset, limit = max(offset, 0), min(limit, MAX_LISTED) if limit > 0 else MAX_LISTED
            cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
            return json_response({name: found[offset : offset + limit], "cursor": cursor})

        self._app.router.add_get(f"/api/v1/{path}", handle)

    async def create_session(self, request: web.Request) -> web.Response:
        await read_bytes(request, timeout_s=self._timeout_s)
        tenant, key = await self._tenant(request), request.headers.get(_IDEMPOTENCY_HEADER)
        return json_response(await self._service.create_session(tenant, key))

    async def compute(self, request: web.Request) -> web.Response:
        data = await read_bytes(request, timeout_s=self._timeout_s, content_type=_PROTOBUF)
        body = await asyncio.to_thread(wire.read_pass, data)
        return json_response(await self._service.compute(await self._tenant(request), body))

    async def retrieve(self, request: web.Request) -> web.Response:
        body = await read_request(request, wire.FutureBody, timeout_s=self._timeout_s)
        futures = (await self._tenant(request)).futures
        result = await futures.result(body.request_id, timeout_s=POLL_S)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=_PROTOBUF)
        pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return json_response(pending if result is None else result)


def add_routes(
    app: web.Application, service: TrainingService, *, client_config: Reply, timeout_s: float
) -> None:
    app.on_cleanup.append(service.close)
    routes = TrainingRoutes(app, service, timeout_s=timeout_s)
    post, plain, listing = routes.post, routes.plain, routes.listing
    plain("POST", "client/config", client_config)
    plain("POST", "client/dynamic_config", {})
    plain("POST", "telemetry", {"status": "accepted"})
    plain("GET", "healthz", {"status": "ok"})
    plain("GET", "get_server_capabilities", service.capabilities)
    app.router.add_post("/api/v1/create_session", routes.create_session)
    plain("POST", "sessions/{session}/finish", service.finish_session)
    post("session_heartbeat", wire.SessionBody, service.heartbeat)
    post("create_model", wire.CreateModelBody, service.create_model)
    post("get_info", wire.ModelBody, service.get_info)
    app.router.add_post("/api/v1/forward_backward", routes.compute)
    post("optim_step", wire.OptimStepBody, service.optim_step)
    post("save_weights", wire.SaveBody, service.save_weights)
    post("save_weights_for_sampler", wire.SaveBody, service.save_for_sampler)
    post("load_weights", wire.LoadBody, service.load_weights)
    post("weights_info", wire.PathBody, service.weights_info)
    listing("checkpoints", "checkpoints", service.list_states)
    listing("training_runs", "training_runs", service.list_runs)
    listing("training_runs/{run}/checkpoints", "checkpoints", service.list_states)
    plain("GET", "training_runs/{run}", service.get_run)
    plain("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}", service.delete_state)
    post("create_sampling_session", wire.CreateSamplerBody, service.create_sampler)
    plain("GET", "samplers/{sampler}", service.get_sampler)
    post("asample", wire.SampleBody, service.sample)
    app.router.add_post("/api/v1/retrieve_future", routes.retrieve)
