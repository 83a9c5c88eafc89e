"""Workers that are forked: in everything but their start they are as those started directly."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_worker import answer, ask
from hosts import is_forked

from millrace.cluster.fork_server import (
    ForkedChild,
    ForkServer,
    is_supported,
    shared_fork_server,
)
from millrace.cluster.hub import Hub
from millrace.core.errors import WorkerError

pytestmark = pytest.mark.skipif(not is_supported(), reason="the fork server needs Linux")

TESTS = Path(__file__).parent


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with Hub(
        log_dir=tmp_path / "logs",
        on_event=lambda *_: None,
        stop_timeout_s=4.0,
        start_timeout_s=30.0,
        preload=["numpy"],
    ) as hub:
        yield hub


def server_of(pid: int) -> psutil.Process:
    return servers_of(pid)[-1]


def servers_of(pid: int) -> list[psutil.Process]:
    """The oldest first."""
    children = [c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    servers = [c for c in children if "millrace.cluster.fork_server" in c.cmdline()]
    return sorted(servers, key=lambda server: server.create_time())


async def echoes(worker) -> bool:
    reply, expected = await worker.call(ask("echo")), answer(ask("echo").request.prompt)
    return (reply.completions[0].tokens == expected.completions[0].tokens).all()


async def test_forked_worker_is_a_child_in_its_own_session_with_its_own_command_line(hub):
    worker = await hub.launch("echo-0", "echo_worker")
    process = psutil.Process(worker.pid)
    assert is_forked(worker.pid)
    assert process.ppid() == os.getpid()
    assert os.getsid(worker.pid) == worker.pid
    assert process.cmdline()[1:5] == ["-m", "echo_worker", "--name", "echo-0"]
    assert await echoes(worker)


async def test_workers_can_be_forked_at_the_same_time(hub):
    workers = await asyncio.gather(*(hub.launch(f"echo-{i}", "echo_worker") for i in range(4)))
    assert len({worker.pid for worker in workers}) == 4
    assert all([is_forked(worker.pid) and await echoes(worker) for worker in workers])


@pytest.mark.parametrize(
    ("end", "sentence"),
    [("exit 3", "exited with code 3"), ("raise", "failed: RuntimeError: out of luck")],
)
async def test_exit_of_a_forked_worker_is_described_and_its_log_is_kept(
    hub, tmp_path, end, sentence
):
    worker = await hub.launch("echo-0", "echo_worker")
    with pytest.raises(WorkerError, match=sentence):
        await worker.call(ask(end))
    assert await worker.is_gone_within(10)
    log = (tmp_path / "logs" / "echo-0.log").read_text()
    assert ("the last line of its log" if end == "exit 3" else "Traceback") in log


async def test_killed_forked_worker_is_described_with_its_signal_and_can_be_replaced(hub):
    worker = await hub.launch("echo-0", "echo_worker")
    os.kill(worker.pid, signal.SIGKILL)
    error = await asyncio.wait_for(worker.dead, 10)
    assert "was killed by SIGKILL" in str(error)
    assert error.was_killed
    assert not psutil.pid_exists(worker.pid)  # it was reaped
    again = await hub.launch("echo-0", "echo_worker")
    assert is_forked(again.pid)


async def test_stopped_forked_worker_leaves_no_process(hub):
    worker = await hub.launch("echo-0", "echo_worker")
    await worker.stop()
    assert not psutil.pid_exists(worker.pid)


async def test_worker_with_another_environment_is_started_directly(hub):
    direct = await hub.launch("echo-0", "echo_worker", env={"OMP_NUM_THREADS": "3"})
    forked = await hub.launch("echo-1", "echo_worker", env={"CUDA_MPS_PIPE_DIRECTORY": "/tmp"})
    assert not is_forked(direct.pid)
    assert psutil.Process(direct.pid).environ()["OMP_NUM_THREADS"] == "3"
    assert is_forked(forked.pid)


async def test_workers_survive_the_server_and_later_ones_are_started_directly(hub):
    forked = await hub.launch("echo-0", "echo_worker")
    server = server_of(os.getpid())
    server.kill()
    direct = await hub.launch("echo-1", "echo_worker")
    assert not is_forked(direct.pid)
    assert await echoes(forked)
    assert await echoes(direct)


async def test_workers_start_directly_if_the_server_cannot_import(tmp_path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, preload=["no_such_module"]) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        assert not is_forked(worker.pid)
    assert "No module named 'no_such_module'" in (tmp_path / "fork_server.log").read_text()


def test_users_share_a_server_that_ends_with_the_last_one():
    before = servers_of(os.getpid())
    with shared_fork_server(["numpy"]) as first:
        with shared_fork_server(["numpy"]) as second:
            assert second is first
        assert first.is_alive
        with shared_fork_server(["json"]) as other:
            assert other is not first
    assert servers_of(os.getpid()) == before


def test_server_that_died_is_replaced_for_the_next_user():
    before = servers_of(os.getpid())
    with shared_fork_server(["numpy"]) as first:
        server = server_of(os.getpid())
        server.kill()
        server.wait()
        with shared_fork_server(["numpy"]) as second:
            assert second is not first
            assert second.is_alive
    assert servers_of(os.getpid()) == before


async def test_failed_fork_leaves_no_process_and_the_server_goes_on(tmp_path):
    server = ForkServer(["numpy"])
    try:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        log = tmp_path / "no_such_folder" / "log"
        before = psutil.Process().children()
        assert await server.fork(["mute_worker", "--name", "mute-0"], env=env, log=log) is None
        child = await fork_mute(server, tmp_path)
        assert child is not None
        child.send_signal(signal.SIGKILL)
        await child.wait()
        assert psutil.Process().children() == before
    finally:
        server.close()


@pytest.mark.gpu
async def test_forked_worker_uses_the_gpu_though_the_server_has_imported_torch(tmp_path):
    program = "import torch\nassert torch.ones(2, device='cuda').sum().item() == 2\n"
    (tmp_path / "cuda_program.py").write_text(program)
    server = ForkServer(["torch"])
    try:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        child = await server.fork(["cuda_program"], env=env, log=tmp_path / "log")
        assert child is not None, (tmp_path / "fork_server.log").read_text()
        assert await child.wait() == 0, (tmp_path / "log").read_text()
    finally:
        server.close()


@pytest.mark.gpu
async def test_workers_start_directly_if_an_import_initialises_cuda(tmp_path, monkeypatch):
    (tmp_path / "cuda_at_import.py").write_text("import torch\ntorch.cuda.init()\n")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["cuda_at_import"])
    try:
        assert await fork_mute(server, tmp_path) is None
        assert "has initialised CUDA" in (tmp_path / "fork_server.log").read_text()
    finally:
        server.close()


def fork_mute(server: ForkServer, folder: Path) -> Coroutine[Any, Any, ForkedChild | None]:
    """A worker that sends nothing."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return server.fork(["mute_worker", "--name", "mute-0"], env=env, log=folder / "log")


async def cancel_launch(server: ForkServer, folder: Path) -> None:
    forking = asyncio.create_task(fork_mute(server, folder))
    await asyncio.sleep(0)
    forking.cancel()
    await asyncio.gather(forking, return_exceptions=True)


async def test_worker_whose_launch_is_cancelled_does_not_stay(tmp_path):
    server = ForkServer(["numpy"])
    try:
        await cancel_launch(server, tmp_path)
        child = await fork_mute(server, tmp_path)  # after the first
        assert child is not None
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        async with asyncio.timeout(10):
            while "mute-0" in str([c.cmdline() for c in psutil.Process().children()]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        server.close()


def test_worker_whose_launch_is_cancelled_does_not_outlive_the_event_loop(tmp_path):
    """The loop is about to end while the server still imports and forks the worker afterwards."""
    server = ForkServer(["numpy"])
    try:
        asyncio.run(cancel_launch(server, tmp_path))
        assert "mute-0" not in str([c.cmdline() for c in psutil.Process().children()])
    finally:
        server.close()


def test_forked_workers_and_their_server_die_with_a_killed_controller(tmp_path):
    command = [sys.executable, str(TESTS / "doomed_controller.py"), str(tmp_path), "numpy"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert [is_forked(pid) for pid in pids] == [True, True]
        processes = [psutil.Process(pid) for pid in pids] + [server_of(controller.pid)]
    finally:
        controller.kill()
        controller.communicate()
    assert not psutil.wait_procs(processes, timeout=10)[1]
