"""What every launcher promises, with real processes and real kills."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from launchers import open_launcher

from millrace.cluster.hub import Hub
from millrace.cluster.launchers.launcher import Launcher, Resources
from millrace.cluster.messages import GenerateDone
from millrace.cluster.worker import Worker
from millrace.core.errors import WorkerError

from echo_worker import ask  # isort: skip - launchers.py finds it

Launch = Callable[..., Awaitable[Worker]]


async def pid_of(worker: Worker) -> int:
    reply = await worker.call(ask("pid"))
    assert isinstance(reply, GenerateDone)
    return int(reply.completions[0].tokens[0])


async def wait_until_dead(*processes: psutil.Process, timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                while process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


async def failure_of(worker: Worker, what: str) -> WorkerError:
    with pytest.raises(WorkerError) as raised:
        await asyncio.wait_for(worker.call(ask(what)), 20)
    return raised.value


class LauncherContract:
    kind: str
    end_timeout_s = 20.0  # of all processes after the death of the controller

    @pytest.fixture
    async def launched(self, tmp_path: Path) -> AsyncIterator[tuple[Hub, Launcher]]:
        async with open_launcher(self.kind, tmp_path) as opened:
            await opened[1].reserve({"echo-0": Resources()})
            yield opened

    @pytest.fixture
    def launch(self, launched: tuple[Hub, Launcher]) -> Launch:
        hub, launcher = launched

        async def launch(module: str = "echo_worker", **settings) -> Worker:
            return await hub.launch("echo-0", module, launcher=launcher, **settings)

        return launch

    async def test_worker_answers_with_its_environment_until_it_is_stopped(self, launch: Launch):
        worker = await launch(env={"JUDGE_NAME": "x"})
        reply = await worker.call(ask("count secrets"))
        assert isinstance(reply, GenerateDone)
        assert reply.completions[0].tokens.tolist() == [1]  # what was given; not the hub's token
        process = psutil.Process(await pid_of(worker))
        await worker.stop()
        assert str(await worker.dead) == "Worker 'echo-0' was stopped."
        await wait_until_dead(process)

    async def test_sigkill_is_reported_and_the_worker_can_be_started_again(self, launch: Launch):
        worker = await launch()
        pid = await pid_of(worker)
        asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGKILL)
        for error in await asyncio.gather(*(failure_of(worker, "echo after 99") for _ in range(5))):
            assert "'echo-0' was killed by SIGKILL" in str(error)
            assert error.was_killed
        assert await pid_of(await launch()) != pid

    async def test_exit_is_reported_with_its_code_and_the_end_of_the_log(self, launch: Launch):
        error = await failure_of(await launch(), "exit 7")
        assert "'echo-0' exited with code 7; its log is " in str(error)
        assert error.traceback.endswith("the last line of its log")
        assert not error.was_killed

    async def test_kill_ends_the_worker_and_its_children(self, launch: Launch):
        worker = await launch()
        reply = await worker.call(ask("have a child"))
        assert isinstance(reply, GenerateDone)
        pids = [await pid_of(worker), int(reply.completions[0].tokens[0])]
        processes = [psutil.Process(pid) for pid in pids]
        worker.kill()
        assert await worker.is_gone_within(10)
        await wait_until_dead(*processes)

    async def test_worker_that_cannot_start_is_reported_with_its_log(self, launch: Launch):
        with pytest.raises(WorkerError, match="'echo-0' exited with code 1; its log is") as raised:
            await launch("no_such_module")
        assert "No module named no_such_module" in raised.value.traceback

    async def test_death_of_the_controller_leaves_no_process(self, tmp_path: Path):
        controller = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("launchers.py")),
            self.kind,
            str(tmp_path),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert controller.stdout is not None
        pid = int(await asyncio.wait_for(controller.stdout.readline(), 60))
        processes = psutil.Process(controller.pid).children(recursive=True)
        worker = psutil.Process(pid)
        controller.kill()
        await controller.wait()
        await wait_until_dead(worker)
        await wait_until_dead(*processes, timeout_s=self.end_timeout_s)


class HostLauncherContract(LauncherContract):
    """Of launchers that start a host program for each worker."""

    async def test_death_of_the_host_program_ends_its_worker(self, launch: Launch):
        worker = await launch()
        process = psutil.Process(await pid_of(worker))
        program = process.parent()
        assert program is not None
        asyncio.get_running_loop().call_later(0.1, program.kill)
        error = await failure_of(worker, "echo after 99")
        assert "'echo-0' lost its " in str(error)
        await wait_until_dead(process)
        assert await pid_of(await launch()) != process.pid
