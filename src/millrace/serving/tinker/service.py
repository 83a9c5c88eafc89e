"""What each request of the training API does.

A method gets the tenant and the checked body, and returns the reply. Work that takes time becomes a
future, whose id is the reply. Runs on the server's event loop.
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millrace.core.errors import CheckpointError, TaskError
from millrace.serving.api.errors import ApiError
from millrace.serving.api.reading import read_body
from millrace.serving.clients import Client
from millrace.serving.served_model import ServedModel, num_tokens
from millrace.serving.settings import TrainingSettings
from millrace.serving.tinker import wire
from millrace.serving.tinker.adapter_slots import AdapterSlots
from millrace.serving.tinker.computing import TrainingThread
from millrace.serving.tinker.execution import RequestExecutor
from millrace.serving.tinker.request_log import AcceptedRequest, AuditLog, RequestLog, Result
from millrace.serving.tinker.sampling import sample_request
from millrace.serving.tinker.states import (
    EXPIRES,
    SavedState,
    delete_expired,
    delete_state,
    read_state,
    run_reply,
    saved_states,
)
from millrace.serving.tinker.tenants import SessionOrder, Tenant, Work
from millrace.training.adapters.requests import AdapterShape
from millrace.training.checkpoints.directory import read_run_state

_STEP_TOKENS = 256  # that a request without data counts as, when tenants take turns
_AUDIT_FILE = "audit.jsonl"
_UNSAVED = "unsaved"  # folder of weights that only samplers use
_RUNNING = "running"  # folder of snapshots of models in training
_REQUEST = "request"  # in what a state says about itself: the id of the request that saved it

Reply = dict[str, Any]


class TrainingService:
    def __init__(
        self,
        served: ServedModel,
        thread: TrainingThread,
        slots: AdapterSlots,
        *,
        settings: TrainingSettings,
        model_path: str,
    ) -> None:
        self._served, self._thread, self._slots = served, thread, slots
        self._settings, self._model_path = settings, model_path
        self._tenants: dict[str, asyncio.Task[Tenant]] = {}
        self._sessions = SessionOrder()
        self._audit = AuditLog(settings.folder / _AUDIT_FILE)
        self._log = RequestLog(settings.folder)
        running = settings.folder / _RUNNING
        self._executor = RequestExecutor(running, log=self._log, thread=thread, audit=self._audit)
        self._log.remove_unused(running, settings.folder / _UNSAVED)

    async def close(self, _app: object) -> None:
        await self._log.close()
        self._audit.close()

    async def tenant(self, client: Client) -> Tenant:
        """Its first request waits until the models that it had are there again."""
        if client.tenant not in self._tenants:
            self._tenants[client.tenant] = asyncio.create_task(self._restored(client))
        return await asyncio.shield(self._tenants[client.tenant])

    async def _restored(self, client: Client) -> Tenant:
        tenant = Tenant(client, self._settings.folder, self._served.quotas.of(client))
        try:
            await self._executor.restore(tenant, self._submit_again)
        except BaseException:
            del self._tenants[client.tenant]  # the next request tries again
            tenant.futures.cancel()
            raise
        for id in tenant.sessions:
            self._sessions.hear(tenant, id)
        return tenant

    async def _submit_again(self, tenant: Tenant, request: AcceptedRequest) -> None:
        if request.operation in ("forward", "forward_backward"):
            await self.compute(tenant, await asyncio.to_thread(wire.read_pass, request.body or b""))
            return
        kind, answer = {
            "create_model": (wire.CreateModelBody, self.create_model),
            "optim_step": (wire.OptimStepBody, self.optim_step),
            "save_weights": (wire.SaveBody, self.save_weights),
            "save_weights_for_sampler": (wire.SaveBody, self.save_for_sampler),
            "load_weights": (wire.LoadBody, self.load_weights),
            "sample": (wire.SampleBody, self.sample),
        }[request.operation]
        await answer(tenant, read_body(kind, request.body or b""))
        if request.operation == "create_model":  # later requests need it
            await tenant.futures.result(request.id)

    async def capabilities(self, _tenant: Tenant) -> Reply:
        size = {"max_context_length": self._thread.max_context}
        return {"supported_models": [{"model_name": self._served.name, **size, "trainable": True}]}

    # Sessions and models

    async def create_session(self, tenant: Tenant, key: str | None) -> Reply:
        """`key`: the same if the client sends the request again; None opens another session."""
        for owner, silent in self._sessions.take_silent():
            await self._end_session(owner, silent, "end_silent_session")
        known = {*tenant.sessions}
        id = tenant.open_session(key)
        self._sessions.hear(tenant, id)
        try:
            await self._log.add_session(tenant.name, id)
        except ApiError:
            tenant.close_session(id)
            self._sessions.remove(id)
            raise
        if id not in known:
            self._audit.write(tenant.name, "create_session", about=id)
        return {"session_id": id}

    async def heartbeat(self, tenant: Tenant, body: wire.SessionBody) -> Reply:
        self._sessions.hear(tenant, body.session_id)
        return {}

    async def finish_session(self, tenant: Tenant, session_id: str) -> None:
        await self._end_session(tenant, session_id, "finish_session")

    async def _end_session(self, tenant: Tenant, id: str, operation: str) -> None:
        """Also its models and samplers."""
        known = {*tenant.models}
        models = tenant.close_session(id)
        self._sessions.remove(id)
        self._audit.write(tenant.name, operation, about=id)
        for model in filter(known.__contains__, models):  # without those that were not created
            self._audit.write(tenant.name, "end_model", about=model)
        await self._executor.remove(id, models)

    async def create_model(self, tenant: Tenant, body: wire.CreateModelBody) -> Reply:
        tenant.session(body.session_id)
        lora = body.lora_config
        self._check_base(body.base_model)
        if lora.rank > (most := self._settings.max_rank):
            raise ApiError(f"Rank {lora.rank} exceeds --train-max-rank {most}.")
        if lora.seed is None:  # the adapter has to be the same if it is created again
            lora = lora.model_copy(update={"seed": secrets.randbits(63)})

        async def create(id: str) -> Result:
            model = tenant.add_model(id, lora.shape, session=body.session_id)
            try:
                await self._executor.create_adapter(tenant.name, id, model, seed=lora.seed)
            except BaseException:
                tenant.models.pop(id, None)
                raise
            return {"model_id": id}

        id = await self._executor.submit(
            tenant,
            "create_model",
            body.session_id,
            body.model_seq_id,
            body.model_copy(update={"lora_config": lora}).as_json(),
            create,
        )
        return {"request_id": id}

    def _check_base(self, name: str) -> None:
        if name not in (self._served.name, self._model_path):
            raise ApiError(f"Model {name!r:.200} is unknown; this server has {self._served.name}.")

    async def get_info(self, tenant: Tenant, body: wire.ModelBody) -> Reply:
        names = {"model_name": self._served.name, "tokenizer_id": self._model_path}
        rank = tenant.model(body.model_id).shape.rank
        info = {"is_lora": True, "lora_rank": rank, "model_name": self._served.name}
        return {"model_id": body.model_id, "model_data": names, **info}

    async def _turn(
        self,
        tenant: Tenant,
        body: wire.TurnBody | wire.PassBody,
        work: Work,
        operation: str,
        tokens: int = 0,
    ) -> Reply:
        """The future of work on a model, which comes after its earlier requests."""
        model, key = tenant.model(body.model_id), (body.model_id, body.seq_id)
        if body.seq_id < model.next_seq and key not in tenant.futures.ids:
            raise ApiError(f"Request {body.seq_id} of the model was executed long ago.")
        model.used_s = time.time()
        data = body.body if isinstance(body, wire.PassBody) else body.as_json()
        id = await self._executor.submit(tenant, operation, *key, data, work, tokens=tokens)
        return {"request_id": id}

    # Training and saved states

    async def compute(self, tenant: Tenant, body: wire.PassBody) -> Reply:
        async def compute(_id: str) -> Result:
            logprobs, loss = await self._thread.compute(tenant.name, body)
            return await asyncio.to_thread(wire.pass_result, logprobs, loss)

        operation = "forward_backward" if body.backward else "forward"
        return await self._turn(tenant, body, compute, operation, body.num_tokens)

    async def optim_step(self, tenant: Tenant, body: wire.OptimStepBody) -> Reply:
        async def step(_id: str) -> Result:
            adam, id = body.adam_params.settings(), body.model_id
            return {"metrics": await self._thread.run_next(lambda a: a.step(id, adam))}

        return await self._turn(tenant, body, step, "optim_step")

    async def save_weights(self, tenant: Tenant, body: wire.SaveBody) -> Reply:
        save = partial(self._save, tenant, body, kind="weights")
        return await self._turn(tenant, body, save, "save_weights")

    async def save_for_sampler(self, tenant: Tenant, body: wire.SaveBody) -> Reply:
        save = partial(self._save, tenant, body, kind="sampler_weights")
        return await self._turn(tenant, body, save, "save_weights_for_sampler")

    async def _save(self, tenant: Tenant, body: wire.SaveBody, id: str, *, kind: str) -> Result:
        if body.path is None:
            folder, reply = self._settings.folder / _UNSAVED / id, {"sampling_session_id": id}
            await self._add_sampler(tenant, id, folder, session=None)
        else:
            reply = {"path": f"tinker://{body.model_id}/{kind}/{body.path}"}
            folder = tenant.path_of(reply["path"])

        def save(adapters: Any) -> None:
            delete_expired(tenant.folder)
            is_own = folder.exists() and read_run_state(folder).get(_REQUEST) == id
            if folder.exists() and not body.overwrite and not is_own:
                raise TaskError(f"{body.path!r} exists; choose another name, or overwrite it.")
            used = 0 if body.path is None else sum(s.num_bytes for s in saved_states(tenant.folder))
            if self._settings.max_bytes is not None and used >= self._settings.max_bytes:
                raise TaskError(
                    f"Your saved states take {used} bytes of the quota of"
                    f" {self._settings.max_bytes}; delete some of them."
                )
            expires_s = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
            about = {"base_model": self._served.name, EXPIRES: expires_s, _REQUEST: id}
            adapters.save(body.model_id, folder, optimizer=kind == "weights", about=about)

        await self._brief(tenant, save)
        self._slots.forget(folder)
        return reply

    async def load_weights(self, tenant: Tenant, body: wire.LoadBody) -> Reply:
        id, folder, optimizer = body.model_id, tenant.path_of(body.path), body.optimizer

        def read(adapters: Any) -> None:
            read_state(folder)
            adapters.load(id, folder, optimizer=optimizer)

        async def load(_id: str) -> Result:
            await self._brief(tenant, read)
            return {"path": body.path, "model_id": id}

        return await self._turn(tenant, body, load, "load_weights")

    async def weights_info(self, tenant: Tenant, body: wire.PathBody) -> Reply:
        about = await self._about(tenant.path_of(body.tinker_path))
        shape = AdapterShape(**about["shape"])
        layers = {"train_attn": shape.attention, "train_mlp": shape.mlp}
        base = {"base_model": about["base_model"], "is_lora": True, "lora_rank": shape.rank}
        return {**base, **layers, "train_unembed": False}

    async def list_states(self, tenant: Tenant, model: str | None = None) -> list[Reply]:
        found = await asyncio.to_thread(saved_states, tenant.folder)
        return [state.reply() for state in found if model in (None, state.model)]

    async def list_runs(self, tenant: Tenant) -> list[Reply]:
        """The models in training and those with saved states, the last used one first."""
        states: dict[str, list[SavedState]] = {id: [] for id in tenant.models}
        for state in await asyncio.to_thread(saved_states, tenant.folder):
            states.setdefault(state.model, []).append(state)
        known = {
            id: (model.used_s, self._served.name, model.shape.rank)
            for id, model in tenant.models.items()
        }
        runs = [
            run_reply(id, own, owner=tenant.name, trained=known.get(id))
            for id, own in states.items()
        ]
        return sorted(runs, key=lambda run: run["last_request_time"], reverse=True)

    async def get_run(self, tenant: Tenant, id: str) -> Reply:
        for run in await self.list_runs(tenant):
            if run["training_run_id"] == id:
                return run
        raise ApiError(f"Training run {id!r:.80} does not exist.", status=404)

    async def delete_state(self, tenant: Tenant, model: str, kind: str, name: str) -> None:
        path = f"tinker://{model}/{kind}/{name}"
        folder = tenant.path_of(path)
        if not folder.is_dir():
            raise ApiError(f"There is no saved state {path!r:.200}.", status=404)
        await self._brief(tenant, lambda _: delete_state(folder))
        self._slots.forget(folder)
        self._audit.write(tenant.name, "delete_checkpoint", about=path)

    async def _about(self, folder: Path) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(read_state, folder)
        except CheckpointError as error:
            raise ApiError(str(error), status=404) from None

    async def _brief(self, tenant: Tenant, work: Callable[[Any], Any]) -> Any:
        return await self._thread.run(tenant.name, _STEP_TOKENS, work)

    # Samples

    async def create_sampler(self, tenant: Tenant, body: wire.CreateSamplerBody) -> Reply:
        tenant.session(body.session_id)
        folder = None if body.model_path is None else tenant.path_of(body.model_path)
        if folder is not None:
            await self._about(folder)
        elif body.base_model is not None:
            self._check_base(body.base_model)
        id = f"{body.session_id}:{body.sampling_session_seq_id}"
        await self._add_sampler(tenant, id, folder, session=body.session_id)
        return {"sampling_session_id": id}

    async def _add_sampler(
        self, tenant: Tenant, id: str, folder: Path | None, *, session: str | None
    ) -> None:
        """Also removes the samplers for which there is no room."""
        is_new, surplus = id not in tenant.samplers, tenant.add_sampler(id, folder)
        if is_new:
            self._audit.write(tenant.name, "create_sampler", about=id)
        await self._log.add_sampler(tenant.name, id, folder, session=session)
        for old, removed in surplus.items():
            self._audit.write(tenant.name, "remove_sampler", about=old)
            await self._log.remove_sampler(old)
            if removed is not None and removed.name == old:  # no other sampler has it
                await asyncio.to_thread(shutil.rmtree, removed, True)

    async def get_sampler(self, tenant: Tenant, id: str) -> Reply:
        tenant.sampler(id)
        return {"sampler_id": id, "base_model": self._model_path}

    async def sample(self, tenant: Tenant, body: wire.SampleBody) -> Reply:
        folder, num_bytes = tenant.sampler(body.sampling_session_id), 4 * body.num_tokens
        request = await self._served.prepare(
            lambda: sample_request(self._served, body, folder, client=tenant.client),
            client=tenant.client,
            num_bytes=num_bytes,
        )

        async def sample(_id: str) -> Result:
            charged = self._served.charged([request], client=tenant.client, is_reserved=True)
            with charged as flow:
                scored = None
                if body.prompt_logprobs:
                    scored = await self._prompt_logprobs(tenant, body, request.prompt, folder)
                if folder is None:
                    done = await self._served.complete([request], flow=flow)
                else:
                    async with self._slots.holding(folder, tenant=tenant.name) as name:
                        adapted = replace(request, adapter=name)
                        done = await self._served.complete([adapted], flow=flow)
            sampler, tokens = body.sampling_session_id, flow.num_sampled
            self._audit.write(tenant.name, "sampled", about=sampler, tokens=tokens)
            return wire.sample_result(done, scored)

        num_prompt, num_reserved = num_tokens([request])
        id = await self._executor.submit(
            tenant,
            "sample",
            body.sampling_session_id,
            body.seq_id,
            body.as_json(),
            sample,
            tokens=num_prompt,
            num_reserved=num_reserved,
        )
        numbers = range(body.num_samples)
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{number}" for number in numbers]}

    async def _prompt_logprobs(
        self, tenant: Tenant, body: wire.SampleBody, prompt: np.ndarray, folder: Path | None
    ) -> np.ndarray:
        """Computed in the training thread, because engines score without adapters."""
        scored = await self._thread.run(
            tenant.name, len(prompt), lambda a: a.prompt_logprobs(prompt, folder)
        )
        scored[: -(body.prompt_logprobs_last_n or len(scored))] = np.nan
        return scored
