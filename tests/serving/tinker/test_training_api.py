"""The training API over HTTP, without its client: isolation, order, retries and fairness."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from chat_model import chat_tokenizer, make_chat_model
from fakes import ScriptedEngine
from in_process_engine import InProcessEngine
from mutations import FEW, MANY, costs_little, mutations
from transformers import PreTrainedTokenizerFast
from writing_engine import WritingEngine, until

from millrace.config import EngineConfig
from millrace.core.errors import TaskError
from millrace.core.protocols import Engine
from millrace.core.records import Completion, Request, Sampling
from millrace.environments.tools.calls import FORMATS
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.models.attention.packed import PACKED
from millrace.models.loading import load_model
from millrace.serving.api.errors import ApiError
from millrace.serving.api.openapi import Health
from millrace.serving.clients import Client, TokenQuota, TokenQuotas
from millrace.serving.metrics import ServerMetrics
from millrace.serving.options import ServerLimits
from millrace.serving.served_model import ServedModel
from millrace.serving.server import http_listener, make_app
from millrace.serving.settings import TrainingSettings
from millrace.serving.tinker import protobuf, wire
from millrace.serving.tinker.adapter_slots import AdapterSlots
from millrace.serving.tinker.computing import TrainingThread
from millrace.serving.tinker.routes import add_routes
from millrace.serving.tinker.service import TrainingService
from millrace.serving.tinker.states import EXPIRES
from millrace.serving.tinker.tenants import (
    MAX_FUTURES,
    MAX_MODELS,
    MAX_SAMPLERS,
    MAX_SESSIONS,
    MAX_UNSAVED,
    SILENT_S,
    RequestFuture,
    SessionOrder,
    Tenant,
)
from millrace.training.adapters.adapter_set import AdapterSet
from millrace.training.adapters.requests import PASS_TOKENS, AdapterShape
from millrace.training.checkpoints.directory import RUN_STATE_FILE

# A ForwardBackwardRequest that version 0.36.0 of the client sent.
RECORDED = bytes.fromhex(
    "0a016d10031a88010a100a0e0a0c05000000060000000700000012210a0a616476616e746167657312130a0c"
    "0000803f00000040000040401801220103121f0a086c6f6770726f627312130a0c0000c0bf000080be000000"
    "00180122010312300a0d7461726765745f746f6b656e73121f0a18060000000000000007000000000000002c"
    "0100000000000018022201031a730a080a060a0409000000121e0a0a616476616e746167657312100a080000"
    "803f00000040180122020102121c0a086c6f6770726f627312100a080000c0bf000080be1801220201021229"
    "0a0d7461726765745f746f6b656e7312180a1006000000000000000700000000000000180222020102220370"
    "706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e03f3a1f0a12636c69705f6c6f"
    "775f7468726573686f6c64120909000000000000e03f"
)
KEYS = ("tml-one", "tml-two")
WELL = Health(status="ok", engines=1, serving=1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


class Caller:
    """One tenant. Futures are awaited unless `waits` is False."""

    def __init__(
        self, http: aiohttp.ClientSession, key: str, service: TrainingService | None = None
    ) -> None:
        self._http, self._headers, self.service = http, {"X-API-Key": key}, service

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        how: dict[str, Any] = {"json": body}
        headers = {**self._headers, **headers}
        if isinstance(body, bytes):
            headers, how = {**headers, "Content-Type": "application/x-protobuf"}, {"data": body}
        async with self._http.post(f"/api/v1/{path}", headers=headers, **how) as reply:
            is_json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if is_json else reply.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(f"/api/v1/{path}", headers=self._headers) as reply:
            return reply.status, await reply.json()

    async def delete(self, path: str) -> int:
        async with self._http.delete(f"/api/v1/{path}", headers=self._headers) as reply:
            return reply.status

    async def future(self, path: str, body: Any) -> Any:
        status, reply = await self.post(path, body)
        assert status == 200, reply
        status, result = await self.post("retrieve_future", {"request_id": reply["request_id"]})
        assert status == 200, result
        return result

    async def new_model(self) -> str:
        _, session = await self.post("create_session", {})
        body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        created = await self.future("create_model", {**body, "lora_config": {"rank": 4, "seed": 1}})
        return created["model_id"]

    async def new_sampler(self) -> dict[str, str]:
        _, session = await self.post("create_session", {})
        _, sampler = await self.post(
            "create_sampling_session", {**session, "sampling_session_seq_id": 0}
        )
        return sampler

    async def train(self, model: str, seq_id: int, *, loss: str = "cross_entropy") -> Any:
        return await self.future("forward_backward", a_pass(model, seq_id, loss=loss))

    async def step(self, model: str, seq_id: int) -> Any:
        adam = {"learning_rate": 0.02}
        body = {"model_id": model, "seq_id": seq_id, "adam_params": adam}
        return await self.future("optim_step", body)


def a_pass(model: str, seq_id: int, *, loss: str = "cross_entropy", size: int = 8) -> bytes:
    tokens = np.arange(40, 40 + size + 1)
    chunk = protobuf.write([(1, protobuf.write([(1, tokens[:-1].astype("<i4").tobytes())]))])
    targets = protobuf.write([(1, tokens[1:].astype("<i8").tobytes()), (3, 2)])
    weights = protobuf.write([(1, np.ones(size, "<f4").tobytes()), (3, 1)])
    inputs = [
        (2, protobuf.write([(1, name), (2, tensor)]))
        for name, tensor in (("target_tokens", targets), ("weights", weights))
    ]
    datum = protobuf.write([(1, chunk), *inputs])
    return protobuf.write([(1, model), (2, seq_id), (3, datum), (4, loss)])


def loss_of(result: bytes) -> float:
    (metric,) = protobuf.messages(protobuf.read(result), 3)
    return float(np.frombuffer(protobuf.message(protobuf.read(metric), 2), "<f8")[0])


def adapter_set(model_path: Path, kind: type[AdapterSet] = AdapterSet) -> AdapterSet:
    device = torch.device("cpu")
    model = load_model(str(model_path), dtype=torch.float32, device=device, attention=PACKED)
    return kind(model, path=str(model_path), max_context=64)


@asynccontextmanager
async def callers(
    model_path: Path,
    folder: Path,
    *,
    engine: Engine | None = None,
    tokenizer: Any = None,
    **quotas: int,
) -> AsyncIterator[list[Caller]]:
    served = ServedModel(
        engine or ScriptedEngine("Yes."),
        tokenizer=tokenizer or chat_tokenizer(),
        name="tiny",
        max_context=64,
        tool_format=FORMATS["hermes"],
        metrics=ServerMetrics(),
        quotas=TokenQuotas(quotas.get("max_tokens"), now_s=lambda: 0.0),  # never full again
    )
    app = make_app(served, keys=KEYS, limits=ServerLimits(), health=lambda: WELL)
    thread = TrainingThread(adapter_set(model_path), ThreadPoolExecutor(1))
    service = TrainingService(
        served,
        thread,
        AdapterSlots(["place"], max_users=8),
        settings=TrainingSettings(folder=folder, max_rank=8, **quotas),
        model_path=str(model_path),
    )
    add_routes(app, service, client_config={}, timeout_s=5.0)
    async with (
        http_listener(app, host="127.0.0.1", port=0) as url,
        aiohttp.ClientSession(url) as http,
    ):
        yield [Caller(http, key, service) for key in KEYS]
    served.close()


def test_a_recorded_request_is_read_as_the_client_meant_it():
    body = wire.read_pass(RECORDED)
    assert (body.model_id, body.seq_id, body.loss, body.backward) == ("m", 3, "ppo", True)
    assert body.settings == {"clip_low_threshold": 0.5}
    first, second = body.data
    assert first.tokens.tolist() == [5, 6, 7]
    assert first.inputs["target_tokens"].tolist() == [6, 7, 300]
    np.testing.assert_allclose(first.inputs["logprobs"], [-1.5, -0.25, 0.0])
    assert second.inputs["advantages"].shape == (1, 2)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_damaged_request_is_refused(cut: int):
    with pytest.raises(ApiError):
        wire.read_pass(RECORDED[:-cut])


@pytest.mark.parametrize("shape", [[1] * 100, [0, 2**63], [2**62, 4, 0], [3]])
def test_a_tensor_of_an_impossible_shape_is_refused(shape: list[int]):
    sizes = b"".join(map(protobuf.write_varint, shape))
    tensor = protobuf.write([(1, b"" if 0 in shape else b"\0\0\0\0"), (3, 1), (4, sizes)])
    inputs = (2, protobuf.write([(1, "weights"), (2, tensor)]))
    with pytest.raises(ApiError, match=r"'weights' has \d values, but the shape"):
        wire.read_pass(protobuf.write([(1, "m"), (2, 1), (3, protobuf.write([inputs]))]))


@pytest.mark.parametrize("count", [FEW, MANY])
def test_damaged_passes_are_read_or_refused(count: int):
    def read() -> None:
        for changed in mutations(RECORDED, count=count, seed=5):
            with suppress(ApiError):
                assert wire.read_pass(changed).seq_id < 2**53

    costs_little(read)


async def test_numbers_that_are_too_large_are_refused(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        adam = {"model_id": model, "adam_params": {}}
        assert (await one.post("optim_step", {**adam, "seq_id": 2**63}))[0] == 400
        assert (await one.post("forward_backward", a_pass(model, 2**63)))[0] == 400
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        assert (await one.post("save_weights", {**save, "ttl_seconds": 10**15}))[0] == 400
        _, session = await one.post("create_session", {})
        lora = {"rank": 4, "seed": 2**63}
        create = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        assert (await one.post("create_model", create))[0] == 400
        sample = {**await one.new_sampler(), "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        for params in ({"top_k": 2**31}, {"seed": 2**63}):
            assert (await one.post("asample", {**sample, "sampling_params": params}))[0] == 400
        assert await one.train(model, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling_params": {"stop": "x" * 1025}}, "at most 1024 characters"),
        ({"sampling_params": {"stop": ["x"] * 17}}, "at most 16 items"),
        ({"sampling_params": {"stop": [7] * 400_000}}, "at most 16 items"),
        ({"sampling_params": {"stop": [-1] * 10}}, "greater than or equal to 0"),
        ({"prompt": {"chunks": [{"tokens": [1]}] * 8193}}, "at most 8192 items"),
        ({"prompt": {"chunks": [0] * 100_000}}, "'prompt.chunks.0' = 0"),
        ({"prompt": {"chunks": [{"tokens": [1] * 30}] * 3}}, "has 90 tokens, but the context"),
    ],
)
async def test_stops_and_prompts_of_samples_are_bounded(
    model_path: Path, tmp_path: Path, changes: dict[str, Any], words: str
):
    async with callers(model_path, tmp_path) as (one, _):
        sample = {**await one.new_sampler(), "seq_id": 0, "sampling_params": {}}
        sample = {**sample, "prompt": {"chunks": [{"tokens": [1]}]}, **changes}
        status, reply = await one.post("asample", sample)
    assert (status, words in reply["error"]["message"]) == (400, True), reply


async def test_stops_that_are_tokens_become_texts_in_a_thread(model_path: Path, tmp_path: Path):
    class Tokenizer(PreTrainedTokenizerFast):
        def decode(self, token_ids, *args, **settings):
            threads.add(threading.current_thread().name)
            return super().decode(token_ids, *args, **settings)

    threads: set[str] = set()
    engine, plain = ScriptedEngine("Yes."), chat_tokenizer()
    tokenizer = Tokenizer(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    async with callers(model_path, tmp_path, engine=engine, tokenizer=tokenizer) as (one, _):
        sample = {**await one.new_sampler(), "prompt": {"chunks": [{"tokens": [65]}]}}
        for seq_id, stop in enumerate([[66, 67], ["yes"], "no"]):
            stops = {"sampling_params": {"stop": stop}}
            assert await one.future("asample", {**sample, "seq_id": seq_id, **stops})
    assert [request.sampling.stop for request in engine.requests] == [("B", "C"), ("yes",), ("no",)]
    assert threads
    assert all(name.startswith("prepare") for name in threads)


async def test_tenants_cannot_use_each_others_models_paths_and_futures(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, two):
        model = await one.new_model()
        await one.train(model, 1)
        body = {"model_id": model, "seq_id": 2, "path": "mine"}
        saved = await one.future("save_weights", body)
        _, pending = await one.post("forward_backward", a_pass(model, 3))

        assert (await two.post("forward_backward", a_pass(model, 4)))[0] == 404
        assert (await two.post("get_info", {"model_id": model}))[0] == 404
        assert (await two.post("retrieve_future", {"request_id": pending["request_id"]}))[0] == 404
        assert (await two.post("weights_info", {"tinker_path": saved["path"]}))[0] == 404
        own = await two.new_model()
        body = {"model_id": own, "seq_id": 1, "path": saved["path"], "optimizer": True}
        assert "no saved state" in (await two.future("load_weights", body))["error"]
        for path in (f"tinker://../{model}/weights/mine", "tinker://x/weights/.."):
            assert (await two.post("weights_info", {"tinker_path": path}))[0] == 400
        assert (await one.post("weights_info", {"tinker_path": saved["path"]}))[0] == 200
        status, reply = await Caller(one._http, "tml-three").post("create_session", {})
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")


async def test_a_request_that_is_sent_again_is_executed_once(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, two):
        losses = []
        for caller, times in ((one, 1), (two, 3)):
            model = await caller.new_model()
            for _ in range(times):
                await caller.train(model, 1)
            for _ in range(times):
                await caller.step(model, 2)
            replies = [await caller.post("forward_backward", a_pass(model, 3)) for _ in range(2)]
            assert replies[0] == replies[1]
            losses.append(loss_of(await caller.train(model, 3)))
        assert losses[0] == losses[1]


async def test_a_session_that_is_created_again_is_the_same_one(model_path: Path, tmp_path: Path):
    again = {"X-Idempotency-Key": "stainless-python-retry-1"}  # as the client sends it
    found: list[str] = []
    for _ in range(2):  # also by a restarted server
        async with callers(model_path, tmp_path) as (one, two):
            for caller, more in ((one, again), (one, again), (two, again), (one, {})):
                _, session = await caller.post("create_session", {}, **more)
                found.append(session["session_id"])
                assert (await caller.post("session_heartbeat", session))[0] == 200
    assert found[:3] == found[4:7]
    assert found[0] == found[1]
    assert len({*found}) == 4


async def test_a_tenant_that_could_not_be_restored_is_restored_by_its_next_request(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
    async with callers(model_path, tmp_path) as (one, _):
        journal = tmp_path / "requests/journal.db"
        hidden = journal.rename(journal.with_suffix(".hidden"))
        assert (await one.post("get_info", {"model_id": model}))[0] == 500
        hidden.rename(journal)
        assert (await one.post("get_info", {"model_id": model}))[0] == 200


async def test_requests_of_a_model_run_in_the_order_of_their_numbers(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        adam = {"model_id": model, "seq_id": 2, "adam_params": {}}
        _, later = await one.post("optim_step", adam)
        _, first = await one.post("forward_backward", a_pass(model, 1))
        _, stepped = await one.post("retrieve_future", {"request_id": later["request_id"]})
        assert stepped["metrics"]["grad_norm"] > 0
        assert (await one.post("retrieve_future", {"request_id": first["request_id"]}))[0] == 200
        assert "no gradient" in (await one.step(model, 3))["error"]
        assert "unknown" in (await one.train(model, 4, loss="dro"))["error"]


async def test_metadata_of_any_depth_is_accepted(model_path: Path, tmp_path: Path):
    metadata: dict[str, Any] = {}
    for _ in range(400):
        metadata = {"": metadata}
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        await one.train(model, 1)
        adam = {"model_id": model, "seq_id": 2, "adam_params": {}, "user_metadata": metadata}
        assert "metrics" in await one.future("optim_step", adam)


async def test_a_name_is_not_replaced_unless_the_client_wants_it(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        body = {"model_id": model, "path": "state"}
        assert "path" in await one.future("save_weights", {**body, "seq_id": 1})
        assert "exists" in (await one.future("save_weights", {**body, "seq_id": 2}))["error"]
        again = {**body, "seq_id": 3, "overwrite": True}
        assert "path" in await one.future("save_weights", again)
        assert (await one.post("save_weights", {**body, "seq_id": 4, "path": "../x"}))[0] == 400


async def test_states_are_listed_and_deleted(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, two):
        model, empty = await one.new_model(), await one.new_model()
        for seq_id, (call, more) in enumerate(
            (
                ("save_weights", {"path": "first"}),
                ("save_weights_for_sampler", {"path": "second", "ttl_seconds": 1000}),
                ("save_weights", {"path": "old", "ttl_seconds": 1}),
                ("save_weights_for_sampler", {}),
            ),
            start=1,
        ):
            await one.future(call, {"model_id": model, "seq_id": seq_id, **more})
        await asyncio.sleep(1.1)
        _, reply = await one.get(f"training_runs/{model}/checkpoints")
        first, second = sorted(reply["checkpoints"], key=lambda each: each["checkpoint_id"])[::-1]
        assert first["tinker_path"] == f"tinker://{model}/weights/first"
        assert (first["checkpoint_type"], first["expires_at"]) == ("training", None)
        assert first["size_bytes"] > 1000
        assert (second["checkpoint_type"], second["expires_at"] > "2") == ("sampler", True)
        assert (await one.get("checkpoints?limit=1&offset=1"))[1]["cursor"] == {
            "offset": 1,
            "limit": 1,
            "total_count": 2,
        }
        assert (await one.get("checkpoints?limit=x"))[0] == 400
        _, runs = await one.get("training_runs?limit=20")
        assert {run["training_run_id"] for run in runs["training_runs"]} == {model, empty}
        _, run = await one.get(f"training_runs/{model}")
        assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (
            4,
            first["tinker_path"],
        )

        assert (await two.get("checkpoints"))[1]["checkpoints"] == []
        assert (await two.get(f"training_runs/{model}"))[0] == 404
        path = f"training_runs/{model}/checkpoints/weights"
        assert await two.delete(f"{path}/first") == 404
        assert await one.delete(f"{path}/..") in (404, 405)
        assert await one.delete(f"{path}/first") == 204
        assert await one.delete(f"{path}/first") == 404
        again = {"model_id": model, "seq_id": 5, "path": "first"}
        assert "path" in await one.future("save_weights", again)  # also removes what has expired
    names = {folder.name for folder in tmp_path.rglob("*")}  # noqa: ASYNC240 - the server has ended
    assert "old" not in names
    assert not any(name.startswith(".") for name in names)


async def test_a_state_that_has_expired_is_refused(model_path: Path, tmp_path: Path):
    engine = ScriptedEngine("Yes.")
    async with callers(model_path, tmp_path, engine=engine) as (one, _):
        _, session = await one.post("create_session", {})
        body = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        model = (await one.future("create_model", body))["model_id"]
        save = {"model_id": model, "seq_id": 1, "path": "short", "ttl_seconds": 1000}
        path = (await one.future("save_weights", save))["path"]
        own = {**session, "model_path": path}
        _, sampler = await one.post(
            "create_sampling_session", {**own, "sampling_session_seq_id": 1}
        )
        sample = {**sampler, "prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {}}
        load = {"model_id": model, "path": path, "optimizer": True}
        assert "path" in await one.future("load_weights", {**load, "seq_id": 2})
        assert isinstance(await one.future("asample", {**sample, "seq_id": 1}), bytes)

        (file,) = tmp_path.glob(f"*/{model}/weights/short/{RUN_STATE_FILE}")  # noqa: ASYNC240
        about = json.loads(file.read_text())
        file.write_text(json.dumps({**about, EXPIRES: about[EXPIRES] - 2000}))  # as if it was older
        expected = "The saved state 'short' expired at "
        failed = await one.future("load_weights", {**load, "seq_id": 3})
        assert (failed["category"], failed["error"].startswith(expected)) == ("user", True)
        for call, asked in (
            ("create_sampling_session", {**own, "sampling_session_seq_id": 2}),
            ("weights_info", {"tinker_path": path}),
            ("asample", {**sample, "seq_id": 2}),
        ):
            status, refused = await one.post(call, asked)
            assert status == 404
            assert refused["error"]["message"].startswith(expected), call
        assert len(engine.requests) == 1


async def test_a_key_over_its_quota_is_refused_and_others_are_not(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path, max_tokens=10, max_bytes=20_000) as (one, two):
        model, other = await one.new_model(), await two.new_model()
        first = await one.train(model, 1)
        assert await one.train(model, 1) == first
        await one.train(model, 2)  # 16 of 10 tokens are used
        status, refused = await one.post("forward_backward", a_pass(model, 3))
        assert (status, refused["error"]["code"]) == (429, "quota_exceeded")
        assert await one.train(model, 1) == first  # a repeated request is not counted
        assert (await two.post("forward_backward", a_pass(other, 1)))[0] == 200

        for seq_id in (3, 4, 5):
            body = {"model_id": model, "seq_id": seq_id, "path": f"state-{seq_id}"}
            saved = await one.future("save_weights", body)
            if "error" in saved:
                break
        assert "quota of 20000" in saved["error"]
        await one.delete(f"training_runs/{model}/checkpoints/weights/state-3")
        body = {"model_id": model, "seq_id": seq_id + 1, "path": "fits"}
        assert "path" in await one.future("save_weights", body)


async def test_a_sample_reserves_all_its_completions_and_gives_back_the_rest(
    model_path: Path, tmp_path: Path
):
    engine = WritingEngine("Yes.")
    engine.gate.clear()
    async with callers(model_path, tmp_path, engine=engine, max_tokens=35) as (one, _):
        body = {**await one.new_sampler(), "num_samples": 3}
        prompt = {"chunks": [{"tokens": [40, 41]}]}
        body |= {"prompt": prompt, "sampling_params": {"max_tokens": 20}}
        first = asyncio.create_task(one.future("asample", {**body, "seq_id": 0}))
        await until(lambda: engine.requests)
        status, refused = await one.post("asample", {**body, "seq_id": 1})
        assert (status, refused["error"]["code"]) == (429, "quota_exceeded")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
        assert (await one.post("../../v1/chat/completions", chat))[0] == 429  # the same quota
        engine.gate.set()
        assert isinstance(await first, bytes)  # 2 + 3 * 5 of 35 tokens are used
        assert isinstance(await one.future("asample", {**body, "seq_id": 2}), bytes)
        assert isinstance(await one.future("asample", {**body, "seq_id": 3}), bytes)
        assert (await one.post("asample", {**body, "seq_id": 4}))[0] == 429
        assert (await one.post("asample", {**body, "seq_id": 2}))[0] == 200  # is not executed again
        lines = (tmp_path / "audit.jsonl").read_text().splitlines()
        used = [json.loads(line)["tokens"] for line in lines if '"sample' in line]
        assert used == [2, 15] * 3


async def test_a_request_that_is_refused_for_lack_of_room_takes_no_tokens_of_the_quota(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path, max_tokens=10) as (one, _):
        model = await one.new_model()
        assert one.service is not None
        (tenant,) = [task.result() for task in one.service._tenants.values()]
        waiting: Any = asyncio.get_running_loop().create_future()
        for number in range(MAX_FUTURES):
            tenant.futures.add(f"{number}", RequestFuture(("x", number), waiting, waiting))
        tenant.futures.make_room()  # drops the result of create_model
        for _ in range(3):  # two would use up the quota
            status, refused = await one.post("forward_backward", a_pass(model, 1))
            assert (status, "requests wait" in refused["error"]["message"]) == (429, True)


async def test_the_audit_log_has_a_line_for_each_request(model_path: Path, tmp_path: Path):
    for _ in range(2):  # a restarted server appends
        async with callers(model_path, tmp_path) as (one, two):
            model, _ = await one.new_model(), await two.new_model()
            await one.train(model, 1)
            await one.train(model, 1)
            await one.step(model, 2)
    log = tmp_path / "audit.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    operations = ["create_session", "create_model", "create_session", "create_model"]
    operations += ["forward_backward", "optim_step"]
    assert [line["operation"] for line in lines] == operations * 2
    assert [line["tokens"] for line in lines[:6]] == [0, 0, 0, 0, 8, 0]
    tenants = [line["tenant"] for line in lines]
    assert tenants[0] == tenants[1] == tenants[5] != tenants[2] == tenants[3]
    assert not any(key in log.read_text() for key in KEYS)


async def test_the_audit_log_says_when_samplers_sessions_and_models_begin_and_end(
    model_path: Path, tmp_path: Path
):
    log = tmp_path / "audit.jsonl"
    async with callers(model_path, tmp_path) as (one, _):
        _, session = await one.post("create_session", {})
        body = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        model = (await one.future("create_model", body))["model_id"]
        for number in (0, 1, 1):  # the last one is a repeated request
            asked = {**session, "sampling_session_seq_id": number}
            status, sampler = await one.post("create_sampling_session", asked)
            assert status == 200
        saves = [{"model_id": model, "seq_id": 1 + number} for number in range(MAX_UNSAVED + 1)]
        saved = [await one.future("save_weights_for_sampler", save) for save in saves]
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        about = {(line["operation"], line["about"]) for line in lines}
        assert ("create_sampler", saved[-1]["sampling_session_id"]) in about
        assert ("remove_sampler", saved[0]["sampling_session_id"]) in about
        created = [line["about"] for line in lines if line["operation"] == "create_sampler"]
        assert len(created) == len({*created}) == 2 + MAX_UNSAVED + 1
        assert sampler["sampling_session_id"] in created
        await one.post(f"sessions/{session['session_id']}/finish", {})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ended = [(line["operation"], line["about"]) for line in lines[-2:]]
    assert ended == [("finish_session", session["session_id"]), ("end_model", model)]


async def test_a_failed_request_cannot_forge_a_line_of_the_log(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class FailingEngine(ScriptedEngine):
        async def generate(self, request: Request, *_: Any) -> list[Completion]:
            raise RuntimeError(f"bad stop {request.sampling.stop[0]}")

    async with callers(model_path, tmp_path, engine=FailingEngine()) as (one, _):
        body = {**await one.new_sampler(), "seq_id": 0, "prompt": {"chunks": [{"tokens": [40]}]}}
        stop = "x\nforged\r\x1b[2J"
        body["sampling_params"] = {"max_tokens": 1, "stop": stop}
        assert await one.future("asample", body) == {
            "error": "The server failed.",
            "category": "server",
        }
    assert "bad stop x" in caplog.text
    assert not any(line.startswith("forged") for line in caplog.text.splitlines())
    assert not {"\x1b", "\r"} & {*caplog.text}


async def test_a_finished_session_frees_its_models(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, _):
        _, session = await one.post("create_session", {})
        body = {"session_id": session["session_id"]}
        model = {**body, "model_seq_id": 0, "base_model": "tiny"}
        status, refused = await one.post("create_model", model)
        assert (status, "--train-max-rank 8" in refused["error"]["message"]) == (400, True)
        created = await one.future("create_model", {**model, "lora_config": {"rank": 8}})
        assert (await one.post("get_info", {"model_id": created["model_id"]}))[0] == 200
        assert (await one.post("session_heartbeat", body))[0] == 200
        assert (await one.post(f"sessions/{body['session_id']}/finish", {}))[0] == 204
        assert (await one.post("session_heartbeat", body))[0] == 410
        assert (await one.post("get_info", {"model_id": created["model_id"]}))[0] == 404


async def test_a_key_has_a_bounded_number_of_sessions_and_models(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, two):
        opened = [await one.post("create_session", {}) for _ in range(MAX_SESSIONS)]
        assert {status for status, _ in opened} == {200}
        async with one._http.post(
            "/api/v1/create_session", headers=one._headers, json={}
        ) as refused:
            assert (refused.status, refused.headers["X-Should-Retry"]) == (429, "false")
            assert (await refused.json())["error"]["code"] == "too_many_sessions"
        assert (await two.post("create_session", {}))[0] == 200
        session = opened[0][1]["session_id"]
        body = {"session_id": session, "base_model": "tiny"}
        no_layers = {"rank": 1, "train_mlp": False, "train_attn": False}
        refused = {**body, "model_seq_id": 99, "lora_config": no_layers}
        assert "no layers" in (await one.future("create_model", refused))["error"]
        body["lora_config"] = {"rank": 1, "train_mlp": False}
        created = [
            await one.future("create_model", {**body, "model_seq_id": number})
            for number in range(MAX_MODELS + 1)
        ]
        assert all("model_id" in each for each in created[:-1])
        assert "16 models" in created[-1]["error"]
        assert (await one.post(f"sessions/{session}/finish", {}))[0] == 204
        assert await one.new_model()


def silence(order: SessionOrder, *ids: str) -> None:
    """Let sessions have been silent for too long."""
    for id in ids:
        tenant, heard_s = order._heard[id]
        order._heard[id] = tenant, heard_s - SILENT_S - 1


async def test_sessions_without_heartbeats_end_when_another_begins(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, two):
        silent, heard = await one.new_model(), await one.new_model()
        assert one.service is not None
        (tenant,) = [task.result() for task in one.service._tenants.values()]
        sessions = {own: id for id, models in tenant.sessions.items() for own in models}
        silence(one.service._sessions, *tenant.sessions)
        await one.post("session_heartbeat", {"session_id": sessions[heard]})
        await two.post("create_session", {})
        assert (await one.post("get_info", {"model_id": silent}))[0] == 404
        assert (await one.post("get_info", {"model_id": heard}))[0] == 200


async def test_requests_that_wait_for_earlier_ones_end_with_their_session(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        adam = {"model_id": model, "seq_id": 2, "adam_params": {}}
        replies = [await one.post("optim_step", adam)]
        replies += [await one.post("forward_backward", a_pass(model, 3))]
        assert one.service is not None
        (tenant,) = [task.result() for task in one.service._tenants.values()]
        (session,) = tenant.sessions
        assert (await one.post(f"sessions/{session}/finish", {}))[0] == 204
        for status, reply in replies:
            assert status == 200, reply
            _, result = await one.post("retrieve_future", {"request_id": reply["request_id"]})
            assert result.get("category") == "user", result
            assert "session of the model has ended" in result["error"]


async def test_no_adapter_is_left_of_a_model_whose_session_ends_before_it_is_created(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, two):
        assert one.service is not None
        thread, gate = one.service._thread, threading.Event()
        busy = asyncio.create_task(thread.run("other", 1, lambda _: gate.wait(20)))
        _, session = await one.post("create_session", {})
        body = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        _, created = await one.post("create_model", body)
        (tenant,) = [task.result() for task in one.service._tenants.values()]
        await until(lambda: tenant.models)
        path = f"sessions/{session['session_id']}/finish"
        finishing = asyncio.create_task(one.post(path, {}))
        await until(lambda: thread._brief)  # removes the adapter, which is not there yet
        gate.set()
        assert (await finishing)[0] == 204
        _, result = await one.post("retrieve_future", created)
        assert "session of the model has ended" in result.get("error", ""), result
        await busy
        assert thread.num_models == 0
        assert await two.new_model()


async def test_sessions_that_end_or_are_heard_while_a_silent_one_ends_are_left_alone(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, two):
        await one.new_model()
        _, finished = await one.post("create_session", {})
        _, heard = await one.post("create_session", {})
        assert one.service is not None
        (tenant,) = [task.result() for task in one.service._tenants.values()]
        silence(one.service._sessions, *tenant.sessions)
        gate = threading.Event()
        busy = asyncio.create_task(one.service._thread.run("other", 1, lambda _: gate.wait(20)))
        opening = asyncio.create_task(two.post("create_session", {}))
        await until(lambda: not tenant.models)  # the first one ends, as soon as the thread is free
        assert (await one.post(f"sessions/{finished['session_id']}/finish", {}))[0] == 204
        assert (await one.post("session_heartbeat", heard))[0] == 200
        gate.set()
        status, reply = await opening
        assert status == 200, reply
        assert (await one.post("session_heartbeat", heard))[0] == 200
        await busy


def a_tenant(folder: Path) -> Tenant:
    return Tenant(Client(name="one"), folder, TokenQuota(None))


def test_few_sessions_are_examined_however_many_there_are(tmp_path: Path):
    order, tenant = SessionOrder(), a_tenant(tmp_path)
    ids = [tenant.open_session() for _ in range(200)]
    for id in ids:
        order.hear(tenant, id)
    assert [*order.take_silent()] == []
    silence(order, *ids[1:])
    order.hear(tenant, ids[0])
    taken = [[id for _, id in order.take_silent()] for _ in range(100)]
    assert max(map(len, taken)) == 4
    assert [id for few in taken for id in few] == ids[1:]


def test_a_tenant_keeps_the_samplers_that_it_used_last(tmp_path: Path):
    tenant, session = a_tenant(tmp_path), "session"
    tenant.add_sampler(f"{session}:0", None)
    removed = {}
    for number in range(1, MAX_SAMPLERS + 10):
        assert tenant.sampler(f"{session}:0") is None
        removed |= tenant.add_sampler(f"{session}:{number}", None)
    assert len(tenant.samplers) == MAX_SAMPLERS
    assert removed.keys() == {f"{session}:{number}" for number in range(1, 11)}
    with pytest.raises(ApiError, match="create a new one"):
        tenant.sampler(f"{session}:1")
    unsaved = {str(number): tmp_path / str(number) for number in range(MAX_UNSAVED + 2)}
    removed = {}
    for id, folder in unsaved.items():
        removed |= tenant.add_sampler(id, folder)
    assert [id for id in tenant.samplers if id in unsaved] == [*unsaved][2:]
    assert {removed["0"], removed["1"]} == {unsaved["0"], unsaved["1"]}


async def test_samplers_end_with_their_session(model_path: Path, tmp_path: Path):
    async with callers(model_path, tmp_path) as (one, _):
        _, session = await one.post("create_session", {})
        body = {**session, "sampling_session_seq_id": 0}
        _, sampler = await one.post("create_sampling_session", body)
        path = f"samplers/{sampler['sampling_session_id']}"
        assert (await one.get(path))[0] == 200
        await one.post(f"sessions/{session['session_id']}/finish", {})
        assert (await one.get(path))[0] == 404


async def test_tenants_take_turns_by_their_tokens(model_path: Path):
    thread = TrainingThread(adapter_set(model_path), ThreadPoolExecutor(1))
    order: list[str] = []

    async def work(tenant: str, num_tokens: int) -> None:
        await thread.run(tenant, num_tokens, lambda _: order.append(tenant))

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(work("busy", 1000))
        await asyncio.sleep(0)
        for _ in range(3):
            group.create_task(work("small", 10))
    assert order[:5].count("small") == 3, order  # one runs, and one has as few tokens


async def test_tenants_with_passes_of_unequal_sizes_train_equal_numbers_of_tokens(model_path: Path):
    tokens: Counter[str] = Counter()  # while passes of all tenants wait
    most = 40 * PASS_TOKENS

    class CountedAdapters(AdapterSet):
        def compute(self, passes: Any) -> Any:
            for one in passes:
                tokens[one.model_id] += one.num_tokens if tokens.total() < most else 0
            return [([], 0.0) for _ in passes]

    thread = TrainingThread(adapter_set(model_path, kind=CountedAdapters), ThreadPoolExecutor(1))

    async def train(tenant: str, num_data: int) -> None:
        one = wire.read_pass(a_pass(tenant, 1, size=64))
        one = replace(one, data=[*one.data] * num_data)
        while tokens.total() < most:
            await thread.compute(tenant, one)

    sizes = {"a": 8, "b": 8, "c": 8, "large": 32}
    await asyncio.gather(*(train(name, size) for name, size in sizes.items() for _ in range(16)))
    assert max(tokens.values()) < 1.2 * min(tokens.values()), tokens


async def test_passes_that_wait_at_the_same_time_are_computed_together(model_path: Path):
    together: list[int] = []

    class CountedAdapters(AdapterSet):
        def compute(self, passes: Any) -> Any:
            together.append(len(passes))
            return super().compute(passes)

    adapters = adapter_set(model_path, kind=CountedAdapters)
    thread, free = TrainingThread(adapters, ThreadPoolExecutor(1)), threading.Event()
    passes = {}
    for i in range(12):
        adapters.create(str(i), AdapterShape(rank=4), seed=i)
        passes[str(i)] = wire.read_pass(a_pass(str(i), 1, size=60))
    long = wire.read_pass(a_pass("0", 2, size=60))
    long = replace(long, data=[*long.data] * (PASS_TOKENS // 60 + 1))

    async with asyncio.TaskGroup() as group:
        group.create_task(thread.run("other", 0, lambda _: free.wait(20)))
        await asyncio.sleep(0)
        waiting = [
            group.create_task(thread.compute(f"tenant {name}", one)) for name, one in passes.items()
        ]
        await asyncio.sleep(0)
        free.set()
    assert together[0] == 12
    assert [round(task.result()[1]) for task in waiting] == [round(waiting[0].result()[1])] * 12

    together.clear()
    first = asyncio.create_task(thread.compute("large", long))
    second = asyncio.create_task(thread.compute("small", passes["1"]))
    await asyncio.gather(first, second)
    assert together[0] == 1  # the bound of tokens is reached


async def test_a_step_after_a_pass_comes_before_the_passes_that_wait(model_path: Path):
    order: list[str] = []

    class SlowAdapters(AdapterSet):
        def compute(self, passes: Any) -> Any:
            order.extend(f"pass of {one.model_id}" for one in passes)
            time.sleep(0.5)  # a tenth of it is left for the step
            return [([], 0.0) for _ in passes]

    thread = TrainingThread(adapter_set(model_path, kind=SlowAdapters), ThreadPoolExecutor(1))

    async def train(name: str) -> None:
        one = wire.read_pass(a_pass(name, 1, size=64))
        one = replace(one, data=[*one.data] * (PASS_TOKENS // 64))  # they fill a pass
        await thread.compute(f"tenant {name}", one)
        await asyncio.sleep(0.01)  # the result is written to the disk
        await thread.run_next(lambda _: order.append(f"step of {name}"))

    await asyncio.gather(train("a"), train("b"))
    assert order == ["pass of a", "step of a", "pass of b", "step of b"]


async def test_tenants_that_step_one_after_another_share_their_next_pass(model_path: Path):
    """Otherwise two cohorts would form, which compute in turns: two passes for each round."""
    together: list[int] = []

    class SlowAdapters(AdapterSet):
        def compute(self, passes: Any) -> Any:
            together.append(len(passes))
            time.sleep(0.3)
            return [([], 0.0) for _ in passes]

    thread = TrainingThread(adapter_set(model_path, kind=SlowAdapters), ThreadPoolExecutor(1))

    async def train(name: str, *, begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        for number in range(6):
            one = wire.read_pass(a_pass(name, number + 1, size=4))
            await thread.compute(f"tenant {name}", one)
            await thread.run_next(lambda _: time.sleep(0.01))

    await asyncio.gather(*(train(str(i), begin_s=0.1 * i) for i in range(3)))
    assert together[0] == 1  # the others came while it was computed
    assert max(together) == 3
    assert len(together) <= 9, together


def engine_with_place(adapters: AdapterSet, model_path: Path, blank: Path, *, rank: int):
    """An engine with room for one adapter, which is called "place"."""
    adapters.write_blank(blank, rank=rank)
    config = EngineConfig(max_sequences=4, adapters={"place": str(blank)})
    return build_engine(
        EngineSpec(config=config, device="cpu", model_path=str(model_path), version=0)
    )


async def test_cached_prompts_are_not_shared_between_tenants(model_path: Path, tmp_path: Path):
    spec = EngineSpec(
        config=EngineConfig(max_sequences=4), device="cpu", model_path=str(model_path), version=0
    )
    engine = build_engine(spec, options=EmbeddedBackend(block_tokens=8))
    remote = InProcessEngine(engine, receiver=None)  # type: ignore[arg-type]
    running = asyncio.create_task(remote.run())

    async def num_cached(caller: Caller) -> int:
        before = engine.stats().cached_tokens
        prompt = {"chunks": [{"tokens": [*range(40, 90)]}]}
        sample = {
            **await caller.new_sampler(),
            "seq_id": 0,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 1},
        }
        assert isinstance(await caller.future("asample", sample), bytes)
        return engine.stats().cached_tokens - before

    async with callers(model_path, tmp_path, engine=remote) as (one, two):
        assert await num_cached(one) == 0
        assert await num_cached(one) > 30
        assert await num_cached(two) == 0
        assert await num_cached(two) > 30
    running.cancel()


def test_an_engine_samples_with_an_adapter_that_is_loaded_while_it_runs(
    model_path: Path, tmp_path: Path
):
    adapters = adapter_set(model_path)
    engine = engine_with_place(adapters, model_path, tmp_path / "blank", rank=8)
    prompt = np.arange(40, 52, dtype=np.int32)

    def sample(adapter: str | None, *, salt: str) -> Completion:
        sampling = Sampling(max_new_tokens=6, temperature=0.0)
        request = Request(
            id=salt, prompt=prompt, sampling=sampling, adapter=adapter, cache_salt=salt
        )
        engine.add_request(request)
        finished = []
        while engine.has_work:
            finished += engine.step()
        return finished[0].completions[0]

    def expected(tokens: np.ndarray, folder: Path | None) -> np.ndarray:
        return adapters.prompt_logprobs(np.concatenate([prompt, tokens]), folder)[len(prompt) :]

    own = sample("place", salt="blank")
    np.testing.assert_allclose(own.logprobs, expected(own.tokens, None), atol=1e-5)
    for rank, has_mlp in ((4, True), (8, False)):  # less than the room, and fewer layers
        name, folder = f"rank-{rank}", tmp_path / f"rank-{rank}"
        adapters.create(name, AdapterShape(rank=rank, mlp=has_mlp), seed=rank)
        for tensor, parameter in adapters.owned[name].parameters.items():
            torch.nn.init.normal_(parameter, std=0.1 if ".lora_B." in tensor else 0.3)
        adapters.save(name, folder, optimizer=False, about={})
        engine.bank.load("place", folder)  # pyright: ignore[reportOptionalMemberAccess]
        own = sample("place", salt=name)
        np.testing.assert_allclose(own.logprobs, expected(own.tokens, folder), atol=1e-4)
        assert abs(own.logprobs - expected(own.tokens, None)).max() > 0.01
        base = sample(None, salt=f"base-{rank}")
        np.testing.assert_allclose(base.logprobs, expected(base.tokens, None), atol=1e-5)


def test_an_adapter_of_one_tenant_cannot_break_the_engine_for_others(
    model_path: Path, tmp_path: Path
):
    adapters = adapter_set(model_path)
    engine = engine_with_place(adapters, model_path, tmp_path / "blank", rank=4)
    adapters.create("hostile", AdapterShape(rank=4), seed=1)
    adapters.compute([wire.read_pass(a_pass("hostile", 1))])
    with suppress(TaskError):
        adapters.step("hostile", wire.AdamBody(eps=0.0).settings())  # 0 / 0
    adapters.save("hostile", tmp_path / "hostile", optimizer=False, about={})
    assert engine.bank is not None
    engine.bank.load("place", tmp_path / "hostile")
    sampling = Sampling(max_new_tokens=2, temperature=0.0)
    engine.add_request(Request(id="other", prompt=np.arange(4, dtype=np.int32), sampling=sampling))
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert np.isfinite(finished[0].completions[0].logprobs).all()
