"""MPS around a run, with a stand-in for NVIDIA's executable: real processes, really killed."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.cluster import mps_daemon
from millrace.cluster.mps import PRIORITY_VARIABLE, apart, below_normal, shared_gpu
from millrace.core.errors import ConfigError

HERE = Path(__file__).parent


class Machine:
    """A machine with a GPU and the stand-in on PATH; no other test uses its temp dir."""

    def __init__(self, folder: Path, *, temp: Path) -> None:
        self.gpu = folder / "nvidiactl"
        self.gpu.touch()
        self.log = folder / "mps.log"
        self.temp = temp
        self.record = folder / "record.json"
        self.warnings: list[str] = []
        self.programs = folder / "bin"
        self.programs.mkdir()
        program = self.programs / mps_daemon.CONTROL
        source = (HERE / "fake_mps_control.py").read_text()
        program.write_text(f"#!{sys.executable} -IS\n{source}")
        program.chmod(0o755)

    def share(self, mode: Any = "auto", *, num_cuda_workers: int = 2, **patience: float):
        return shared_gpu(
            mode,
            num_cuda_workers=num_cuda_workers,
            log=self.log,
            warn=self.warnings.append,
            gpu_files=[self.gpu],
            **patience,
        )

    @property
    def daemon(self) -> dict[str, Any]:
        """What the newest daemon wrote about itself."""
        return json.loads(self.record.read_text())

    def is_clean(self) -> bool:
        pids = [self.daemon["daemon"], self.daemon["server"]]
        return not any(is_alive(pid) for pid in pids) and not list(self.temp.iterdir())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    # Not below tmp_path: the path of a socket may not be long.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as temp:
        yield _prepared(Machine(tmp_path, temp=Path(temp)), monkeypatch)


def _prepared(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", f"{machine.programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_RECORD", str(machine.record))
    monkeypatch.setattr("tempfile.tempdir", str(machine.temp))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return machine


async def test_a_daemon_in_a_private_folder_lives_as_long_as_the_run(machine: Machine):
    async with machine.share() as env:
        daemon = machine.daemon
        assert is_alive(daemon["daemon"])
        assert daemon["mode"] == 0o700
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == daemon["pipe"]
        assert env["CUDA_MPS_LOG_DIRECTORY"] == daemon["log"]
        assert mps_daemon.ask("get_server_list", env={**os.environ, **env}, timeout_s=10)
    assert machine.is_clean()
    assert machine.warnings == []
    log = machine.log.read_text()
    assert f"share their GPU through MPS, daemon process {daemon['daemon']}" in log
    assert "the daemon's own words" in log


async def test_a_run_that_fails_leaves_no_daemon(machine: Machine):
    with pytest.raises(ValueError, match="a worker died"):
        async with machine.share():
            raise ValueError("a worker died")
    assert machine.is_clean()


async def test_a_cancelled_run_leaves_no_daemon(machine: Machine):
    is_up = asyncio.Event()

    async def run() -> None:
        async with machine.share():
            is_up.set()
            await asyncio.sleep(3600)

    running = asyncio.create_task(run())
    await is_up.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert machine.is_clean()


async def test_a_run_that_is_cancelled_again_while_it_cleans_up_leaves_no_daemon(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    sharing = machine.share(stop_timeout_s=60.0)
    await sharing.__aenter__()
    leaving = asyncio.create_task(sharing.__aexit__(None, None, None))
    await asyncio.sleep(0.3)
    assert is_alive(machine.daemon["daemon"])
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert machine.is_clean()


async def test_a_daemon_that_does_not_quit_is_killed_with_its_servers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    async with machine.share(stop_timeout_s=0.5):
        assert is_alive(machine.daemon["server"])
    assert machine.is_clean()
    assert "did not quit and is killed" in machine.log.read_text()


async def start_doomed(machine: Machine) -> asyncio.subprocess.Process:
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "doomed_mps_user.py"), str(machine.log), str(machine.gpu)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(machine.temp), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert controller.stdout is not None
    assert await controller.stdout.readline() == b"up\n"
    return controller


async def until_clean(machine: Machine) -> None:
    async with asyncio.timeout(30):
        while not machine.is_clean():  # noqa: ASYNC110 - not our children
            await asyncio.sleep(0.02)


async def test_the_daemon_does_not_outlive_a_controller_that_is_killed(machine: Machine):
    controller = await start_doomed(machine)
    assert is_alive(machine.daemon["daemon"])
    controller.kill()
    await controller.wait()
    await until_clean(machine)


async def test_daemon_does_not_outlive_its_guard(machine: Machine):
    async with machine.share():
        daemon = psutil.Process(machine.daemon["daemon"])
        keeper = daemon.parent()
        assert keeper is not None
        keeper.kill()
        async with asyncio.timeout(10):
            while is_alive(daemon.pid):  # noqa: ASYNC110 - not our child
                await asyncio.sleep(0.02)
    os.kill(machine.daemon["server"], 9)  # of the stand-in, which nothing else would end
    assert not list(machine.temp.iterdir())


@pytest.mark.parametrize("fault", ["broken", "mute"])
async def test_daemon_that_does_not_start_costs_a_warning_only(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setenv("FAKE_MPS", fault)
    async with machine.share(start_timeout_s=3.0 if fault == "mute" else 15.0) as env:
        assert env == {}
    (warning,) = machine.warnings
    assert "MPS did not start" in warning
    assert "one process at a time" in warning
    assert {"broken": "exited with code 1", "mute": "did not answer within"}[fault] in warning
    assert "\n" not in warning
    assert list(machine.temp.iterdir()) == []
    if fault == "mute":
        assert machine.is_clean()
    else:
        assert "no device, no daemon" in machine.log.read_text()


async def test_on_fails_with_a_sentence_when_the_daemon_does_not_start(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_MPS", "broken")
    with pytest.raises(ConfigError, match=r"= 'mps', but MPS did not start: .*code 1"):
        async with machine.share("mps"):
            pytest.fail("the run must not begin")
    assert list(machine.temp.iterdir()) == []


async def test_existing_daemon_is_used_and_not_touched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "pipe").mkdir()
    (tmp_path / "log").mkdir()
    for name, value in mps_daemon.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    daemon = await asyncio.create_subprocess_exec(mps_daemon.CONTROL, "-f")
    try:
        while not mps_daemon.ask("get_server_list", env=os.environ, timeout_s=10):
            assert daemon.returncode is None
        for mode in ("auto", "mps"):
            async with machine.share(mode) as env:
                assert env == {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe")}
                assert below_normal(env)[PRIORITY_VARIABLE] == "1"
                scorers = apart(env, private=tmp_path)
                assert not mps_daemon.ask(
                    "get_server_list", env={**os.environ, **scorers}, timeout_s=10
                )
        assert is_alive(daemon.pid)
        assert machine.daemon["daemon"] == daemon.pid
        assert "was already there" in machine.log.read_text()
    finally:
        assert mps_daemon.ask("quit", env=os.environ, timeout_s=10)
        await daemon.wait()


async def test_a_dead_daemons_pipe_directory_does_not_keep_the_run_from_starting_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    async with machine.share() as env:
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == machine.daemon["pipe"] != str(tmp_path)
    assert machine.is_clean()


async def test_the_choice_of_gpus_is_left_to_the_workers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    async with machine.share() as env:
        assert machine.daemon["visible"] is None
        assert "CUDA_VISIBLE_DEVICES" not in env


@contextlib.contextmanager
def nothing_starts(machine: Machine):
    yield
    assert not machine.record.exists()
    assert machine.warnings == []
    assert list(machine.temp.iterdir()) == []


async def test_time_slices_start_no_daemon(machine: Machine):
    with nothing_starts(machine):
        async with machine.share("time_slices") as env:
            assert env == {}


async def test_auto_starts_no_daemon_for_a_single_worker(machine: Machine):
    with nothing_starts(machine):
        async with machine.share(num_cuda_workers=1) as env:
            assert env == {}


@pytest.mark.parametrize(
    ("lack", "sentence"),
    [
        ("gpu", "this machine has no NVIDIA GPU"),
        ("program", "nvidia-cuda-mps-control is not on PATH"),
        ("visible", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("workers", r"\[placement\] leaves no worker that uses a GPU"),
    ],
)
async def test_without_prerequisites_auto_does_nothing_and_on_names_what_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, lack: str, sentence: str
):
    if lack == "gpu":
        machine.gpu.unlink()
    elif lack == "program":
        shutil.rmtree(machine.programs)
    elif lack == "visible":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    num_workers = 0 if lack == "workers" else 2
    with nothing_starts(machine):
        async with machine.share(num_cuda_workers=num_workers) as env:
            assert env == {}
        with pytest.raises(ConfigError, match=f"cluster.share_gpu = 'mps', but {sentence}"):
            async with machine.share("mps", num_cuda_workers=num_workers):
                pytest.fail("the run must not begin")


USE_CUDA = "import torch; torch.ones(1).cuda(); print('ready', flush=True); input()"


def mps_processes(env: dict[str, str]) -> list[str]:
    """Those of the daemon in `env`; runs of other tests have their own."""
    pipe = "CUDA_MPS_PIPE_DIRECTORY"
    found = [process.info for process in psutil.process_iter(["name", "environ"])]
    return [
        info["name"]
        for info in found
        if info["name"].startswith("nvidia-cuda-mps")
        and (info["environ"] or {}).get(pipe) == env[pipe]
    ]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(mps_daemon.CONTROL) is None, reason="MPS is not installed")
async def test_the_real_daemon_serves_two_processes_and_is_gone_afterwards(tmp_path: Path):
    log = tmp_path / "mps.log"
    async with shared_gpu("mps", num_cuda_workers=2, log=log, warn=pytest.fail) as env:
        assert env, "a daemon of another run is in the way of this test"
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", USE_CUDA),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **env},
            )
            for _ in range(2)
        ]
        for client in clients:
            assert client.stdout is not None
            assert await client.stdout.readline() == b"ready\n"
        listing = await asyncio.create_subprocess_exec(
            mps_daemon.CONTROL,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
        )
        servers, _ = await listing.communicate(b"get_server_list\n")
        assert len(servers.split()) == 1, "both are clients of one server"
        for client in clients:
            await client.communicate(b"\n")
        assert mps_processes(env)
    assert not mps_processes(env)
    assert "share their GPU through MPS" in log.read_text()
    absent = {**os.environ, **env}
    assert not mps_daemon.ask("get_server_list", env=absent, timeout_s=10)
