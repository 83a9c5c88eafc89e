"""Every way a worker can end, with real processes."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from echo_worker import ask

from millrace.cluster.hub import Hub
from millrace.cluster.link import END_SIGNAL
from millrace.cluster.messages import Done, Failed, GenerateDone, Message
from millrace.cluster.process import describe_exit
from millrace.cluster.worker import Worker
from millrace.core.errors import WorkerError

HERE = Path(__file__).parent
Events = list[tuple[str, Message]]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_until_dead(*pids: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 - not our children
            await asyncio.sleep(0.02)


async def failures_of(worker: Worker, *calls: Message) -> list[WorkerError]:
    """What calls raise that are pending when the last one ends the worker."""
    pending = [asyncio.create_task(worker.call(call)) for call in calls]
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 5)
    assert all(isinstance(result, WorkerError) for result in results), results
    return [result for result in results if isinstance(result, WorkerError)]


async def test_an_exception_in_main_fails_all_pending_calls_with_its_traceback(
    hub: Hub, events: Events
):
    worker = await hub.launch("echo-0", "echo_worker")
    errors = await failures_of(worker, ask("echo after 9"), ask("echo after 9"), ask("raise"))
    for error in errors:
        assert str(error) == "Worker 'echo-0' failed: RuntimeError: out of luck."
        assert 'raise RuntimeError("out of luck")' in error.traceback
    assert len({id(error) for error in errors}) == 3
    assert isinstance(events[-1][1], Failed)
    assert str(await worker.dead) == str(errors[0])
    with pytest.raises(WorkerError, match="out of luck"):
        await worker.call(ask("echo"))


async def test_an_exit_fails_all_pending_calls_with_the_end_of_the_log(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    for error in await failures_of(worker, ask("echo after 9"), ask("exit 7")):
        assert str(error) == f"Worker 'echo-0' exited with code 7; its log is {worker.log}."
        assert error.traceback.endswith("the last line of its log")
        assert not error.was_killed


async def test_death_of_a_worker_without_its_log_is_noticed(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    assert worker.log is not None
    worker.log.unlink()
    (error,) = await failures_of(worker, ask("exit 7"))
    assert "exited with code 7" in str(error)
    assert "its log cannot be read" in error.traceback


async def test_end_signal_ends_a_waiting_worker_cleanly(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    assert worker.pid is not None
    os.kill(worker.pid, END_SIGNAL)
    error = await asyncio.wait_for(worker.dead, 3)
    assert "exited with code 143" in str(error)
    assert error.traceback == ""


async def test_sigint_and_sigterm_are_left_to_the_controller(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    os.kill(worker.pid, signal.SIGTERM)
    assert isinstance(await worker.call(ask("echo")), GenerateDone)


async def test_large_reply_arrives_although_the_worker_exits_after_it(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    reply = await worker.call(ask("zeros 10000000 and leave"))
    assert isinstance(reply, GenerateDone)
    assert reply.completions[0].tokens.nbytes == 40_000_000
    assert "exited with code 3" in str(await asyncio.wait_for(worker.dead, 3))


async def test_stop_lets_a_worker_exit_by_itself(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    await worker.stop()
    assert str(await worker.dead) == "Worker 'echo-0' was stopped."
    assert worker.pid is not None
    assert not is_alive(worker.pid)
    await worker.stop()  # again is fine


async def test_stop_terminates_a_worker_that_does_not_answer(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=2.0) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        assert isinstance(await worker.call(ask("sleep")), Done)
        start = time.monotonic()
        await worker.stop()
        assert 0.9 < time.monotonic() - start < 1.9  # after half of the time, and not killed


async def test_stop_kills_a_worker_that_ignores_sigterm(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=0.6) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        await worker.call(ask("go deaf"))
        start = time.monotonic()
        await worker.stop()
        assert 0.5 < time.monotonic() - start < 3
        assert worker.pid is not None
        assert not is_alive(worker.pid)


async def test_a_failed_worker_that_stays_is_killed(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=0.3) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        with pytest.raises(WorkerError, match="out of luck"):
            await worker.call(ask("raise but stay"))
        assert worker.pid is not None
        assert is_alive(worker.pid)
        await wait_until_dead(worker.pid, timeout_s=2)


async def test_the_hub_stops_its_workers_in_parallel(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=1.0) as hub:
        workers = await asyncio.gather(*(hub.launch(f"w{i}", "echo_worker") for i in range(3)))
        await asyncio.gather(*(worker.call(ask("go deaf")) for worker in workers))
        start = time.monotonic()
    assert time.monotonic() - start < 2.5  # one after another: 3 s
    assert not any(is_alive(worker.pid or 0) for worker in workers)


async def test_a_cancelled_close_still_leaves_no_worker(tmp_path: Path):
    hub = Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=60.0)
    await hub.__aenter__()
    worker = await hub.launch("echo-0", "echo_worker")
    await worker.call(ask("go deaf"))
    closing = asyncio.create_task(hub.__aexit__(None, None, None))
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert worker.pid is not None
    assert not is_alive(worker.pid)
    assert not Path(hub.address.removeprefix("ipc://")).parent.exists()


async def test_closing_the_hub_ends_a_worker_that_is_still_starting(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, stop_timeout_s=60.0) as hub:
        launching = asyncio.create_task(hub.launch("mute", "mute_worker"))
        await asyncio.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 5
    with pytest.raises(WorkerError, match="was stopped"):
        await launching


async def test_worker_without_hello_is_killed(tmp_path: Path):
    others = psutil.Process().children()
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, start_timeout_s=0.5) as hub:
        with pytest.raises(WorkerError, match=r"'mute' did not come up within 0\.5 s"):
            await hub.launch("mute", "mute_worker")
    left = [child for child in psutil.Process().children() if child not in others]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


async def start_controller(script: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / script),
        str(folder),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="nothing runs in a process that is stopped")
async def test_a_worker_stopped_while_it_imports_does_not_outlive_a_killed_controller(
    tmp_path: Path,
):
    controller = await start_controller("doomed_starter.py", tmp_path)
    worker: list[psutil.Process] = []
    async with asyncio.timeout(20):
        while not worker:
            await asyncio.sleep(0.02)
            worker = [c for c in psutil.Process(controller.pid).children() if is_up(c)]
    worker[0].suspend()
    await asyncio.sleep(0.05)
    assert worker[0].status() == psutil.STATUS_STOPPED
    controller.kill()
    await wait_until_dead(worker[0].pid, timeout_s=2)
    await controller.wait()


def is_up(process: psutil.Process) -> bool:
    """It is a Python that imports the worker's module, no longer what starts it."""
    return process.cmdline()[1:3] == ["-m", "mute_worker"]


async def test_hung_worker_dumps_its_stacks_to_its_log_before_it_is_killed(hub: Hub):
    worker = await hub.launch("w", "echo_worker")
    await worker.call(ask("sleep"))
    with pytest.raises(WorkerError, match=r"Generate within 0.1 s; its stacks are in"):
        await worker.call(ask("echo"), timeout_s=0.1, kill_on_timeout=True)
    assert await worker.is_gone_within(10)
    assert worker.log is not None
    assert "echo_worker.py" in worker.log.read_text()
    assert "in handle" in (await worker.dead).traceback


async def test_hung_worker_without_its_log_is_killed(hub: Hub):
    worker = await hub.launch("w", "echo_worker")
    await worker.call(ask("sleep"))
    assert worker.log is not None
    worker.log.unlink()
    with pytest.raises(WorkerError, match=r"Generate within 0.1 s; it did not write its stacks"):
        await worker.call(ask("echo"), timeout_s=0.1, kill_on_timeout=True)
    assert await worker.is_gone_within(10)


async def test_stopped_worker_is_killed_without_a_stack_dump(hub: Hub):
    worker = await hub.launch("w", "echo_worker")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(worker.call(ask("echo")))
    await asyncio.sleep(0)
    await worker.fail_hung("made no progress")
    with pytest.raises(WorkerError, match="made no progress; it is stopped"):
        await waiting
    assert await worker.is_gone_within(10)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-34, "was killed by SIGRTMIN"),
        (-40, "was killed by signal 40"),
    ],
)
def test_every_exit_is_described_also_by_signals_without_a_name(code: int, words: str):
    assert describe_exit(code) == words
