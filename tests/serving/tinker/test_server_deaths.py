"""Models in training survive the death of the server and of its engines, over HTTP."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from chat_model import make_chat_model
from forked_command import start_command
from safetensors.numpy import load_file
from test_training_api import KEYS, Caller, a_pass, callers

from millrace.core.errors import ConfigError
from millrace.serving.tinker.request_log import AuditLog

STEPS = 3


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


def operations(model: str, *, save_after: int = 1000, steps: int = STEPS) -> list[tuple[str, Any]]:
    """Paths and bodies: two passes for each step. `save_after` leaves out the next number."""
    found: list[tuple[str, Any]] = []
    for number in range(3 * steps):
        seq_id = number + 1 + (number >= save_after)
        if number % 3 < 2:
            found.append(("forward_backward", a_pass(model, seq_id, size=8 + 4 * (number % 3))))
        else:
            adam = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.02}}
            found.append(("optim_step", adam))
    return found


async def weights_of(caller: Caller, model: str, folder: Path, *, seq_id: int) -> dict[str, Any]:
    body = {"model_id": model, "seq_id": seq_id, "path": f"at-{seq_id}"}
    assert "path" in await caller.future("save_weights", body)
    (state,) = folder.glob(f"*/{model}/weights/at-{seq_id}")  # noqa: ASYNC240 - a few files
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    return {name: t for file in files for name, t in load_file(state / file).items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


async def test_a_model_continues_in_a_new_server_after_each_of_its_requests(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (_, two):
        other = await two.new_model()
        for path, body in operations(other):
            await two.future(path, body)
        expected = await weights_of(two, other, tmp_path, seq_id=3 * STEPS + 1)

    results: dict[str, Any] = {}
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
    for number, (path, body) in enumerate(operations(model)):
        async with callers(model_path, tmp_path) as (one, _):
            for id, result in results.items():
                assert await one.post("retrieve_future", {"request_id": id}) == (200, result)
            _, accepted = await one.post(path, body)
            if number % 3 < 2:  # else the server ends before the step has a result
                asked = {"request_id": accepted["request_id"]}
                _, results[accepted["request_id"]] = await one.post("retrieve_future", asked)
        async with callers(model_path, tmp_path) as (one, _):
            assert await one.post(path, body) == (200, accepted)  # sent again
    async with callers(model_path, tmp_path) as (one, _):
        found = await weights_of(one, model, tmp_path, seq_id=3 * STEPS + 1)
    assert_same(found, expected)


async def test_a_save_is_repeated_only_by_the_request_that_made_it(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, _):
        model = await one.new_model()
        body = {"model_id": model, "seq_id": 1, "path": "mine"}
        saved = await one.future("save_weights", body)
        assert "exists" in (await one.future("save_weights", {**body, "seq_id": 2}))["error"]
    async with callers(model_path, tmp_path) as (one, _):
        assert await one.future("save_weights", body) == saved
        assert "exists" in (await one.future("save_weights", {**body, "seq_id": 2}))["error"]
        assert "exists" in (await one.future("save_weights", {**body, "seq_id": 3}))["error"]


async def test_what_a_finished_session_had_is_gone_after_a_restart(
    model_path: Path, tmp_path: Path
):
    async with callers(model_path, tmp_path) as (one, two):
        _, session = await one.post("create_session", {})
        own = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        created = await one.future("create_model", {**own, "lora_config": {"rank": 4}})
        model, kept = created["model_id"], await two.new_model()
        for caller, id in ((one, model), (two, kept)):
            await caller.train(id, 1)
        assert {path.name for path in (tmp_path / "running").iterdir()} == {model, kept}
        await one.post(f"sessions/{session['session_id']}/finish", {})
    async with callers(model_path, tmp_path) as (one, two):
        assert (await one.post("get_info", {"model_id": model}))[0] == 404
        assert (await two.post("get_info", {"model_id": kept}))[0] == 200
        assert (await one.post("get_info", {"model_id": kept}))[0] == 404
    assert {path.name for path in (tmp_path / "running").iterdir()} == {kept}


def test_a_folder_belongs_to_one_server(tmp_path: Path):
    log = AuditLog(tmp_path / "audit.jsonl")
    with pytest.raises(ConfigError, match="belongs to another server"):
        AuditLog(tmp_path / "audit.jsonl")
    log.close()
    AuditLog(tmp_path / "audit.jsonl").close()


@contextlib.asynccontextmanager
async def killed_server(
    model: Path, folder: Path, port: int
) -> AsyncIterator[tuple[list[Caller], psutil.Process]]:
    """`millrace serve --train`, killed at the end."""
    (folder / "keys").write_text("\n".join(KEYS))
    command = ["serve", str(model), "--train"]
    command += ["--train-dir", str(folder / "states"), "--port", str(port), "--name", "tiny"]
    command += ["--api-key-file", str(folder / "keys"), "--log-dir", str(folder / "logs")]
    command += ["--placement.engines", "cpu", "--cluster.threads=1"]
    process = start_command(*command)
    try:
        assert process.stdout is not None
        assert "Serving" in await asyncio.to_thread(process.stdout.readline)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            yield [Caller(http, key) for key in KEYS], psutil.Process(process.pid)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


def free_port() -> int:
    """A port that stays free while the server is dead: the system gives outgoing connections higher
    ones (32768 and above)."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def test_nothing_is_lost_or_repeated_after_kill_9_of_server_and_engine(
    model_path: Path, tmp_path: Path
):
    port = free_port()
    states, prompt = tmp_path / "states", {"chunks": [{"tokens": [40, 41, 42]}]}
    sampling = {"max_tokens": 4, "temperature": 0.0}

    async def sample(caller: Caller, sampler: str, seq_id: int) -> Any:
        own = {"sampling_session_id": sampler, "seq_id": seq_id}
        body = {**own, "prompt": prompt, "sampling_params": sampling}
        return await caller.future("asample", body)

    async with killed_server(model_path, tmp_path, port) as ((one, two), server):
        other = await two.new_model()
        for path, body in operations(other):
            last = await two.future(path, body)
        expected = await weights_of(two, other, states, seq_id=3 * STEPS + 1)
        model = await one.new_model()
        work = operations(model, save_after=4)
        results = [await one.future(path, body) for path, body in work[:4]]
        save = {"model_id": model, "seq_id": 5}
        sampler = (await one.future("save_weights_for_sampler", save))["sampling_session_id"]
        first = await sample(one, sampler, 0)
        (engine,) = [
            child
            for child in server.children(recursive=True)
            if "millrace.inference.worker" in child.cmdline()
        ]
        engine.kill()
        assert await sample(one, sampler, 1) == first
        # Accepted, and perhaps not executed when the server is killed.
        accepted = [await one.post(path, body) for path, body in work[4:6]]
    async with killed_server(model_path, tmp_path, port) as ((one, two), _):
        for (path, body), result in zip(work[:4], results, strict=True):
            assert await one.future(path, body) == result
        for (path, body), reply in zip(work[4:6], accepted, strict=True):
            assert await one.post(path, body) == reply
        assert await sample(one, sampler, 2) == first
        for path, body in work[6:]:
            own = await one.future(path, body)
        assert own == last
        found = await weights_of(one, model, states, seq_id=3 * STEPS + 2)
        assert_same(found, expected)
        assert (await two.future(*operations(other)[-1])) == last
    paths = [states, *states.rglob("*")]
    modes = {path.stat().st_mode & 0o777 for path in paths if path.is_file()}
    assert modes == {0o600}  # they hold what tenants have sent


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kills_at_random_moments_change_no_weight(model_path: Path, tmp_path: Path):
    port, steps, draw = free_port(), 40, random.Random(0)
    last_seq = 3 * steps + 1
    async with killed_server(model_path, tmp_path, port) as ((one, two), _):
        other, model = await two.new_model(), await one.new_model()
        for path, body in operations(other, steps=steps):
            await two.future(path, body)
        expected = await weights_of(two, other, tmp_path / "states", seq_id=last_seq)
    left, num_kills = operations(model, steps=steps), 0
    found: list[dict[str, Any]] = []

    async def work(one: Caller) -> None:
        while left:
            ahead = [await one.post(path, body) for path, body in left[:3]]
            for _, reply in ahead:
                await one.post("retrieve_future", {"request_id": reply["request_id"]})
            del left[:3]

    while left:
        async with killed_server(model_path, tmp_path, port) as ((one, _), _):
            working = asyncio.create_task(work(one))
            await asyncio.wait({working}, timeout=draw.uniform(0.2, 0.5) if num_kills < 2 else None)
            if not left:
                found.append(await weights_of(one, model, tmp_path / "states", seq_id=last_seq))
        num_kills += 1
        await asyncio.gather(working, return_exceptions=True)
    assert num_kills == 3
    assert_same(found[0], expected)
