"""NVIDIA MPS during a run: kernels of several processes run on a GPU at the same time.

Without MPS a GPU gives processes time slices, one process at a time. Promise: a daemon that this
module started never outlives the run, however the run ends; an existing daemon is used and not
touched. Torch-free. Runs on the controller's event loop; a guard process owns the daemon, see
mps_daemon.py.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from millrace.cluster import mps_daemon
from millrace.cluster.mps_daemon import CONTROL, REPLY_TIMEOUT_S, ask, environment
from millrace.config.run_config import ShareGpu
from millrace.core.errors import ConfigError

GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
PIPE_VARIABLE, DEFAULT_PIPE = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"  # NVIDIA's own default
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"  # 0 = normal, 1 = below normal
COST = "the GPU computes for one process at a time, and engines and trainer wait for each other"


def below_normal(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with a lower kernel priority, for the trainer: its kernels are long and many,
    and a decode step that waits for them delays every sequence."""
    return {**env, PRIORITY_VARIABLE: "1"} if env else {}


def apart(env: Mapping[str, str], *, private: Path) -> dict[str, str]:
    """The environment of processes that may be killed at any time: with MPS such a death disturbs
    all its clients on that GPU, so they look for a daemon where there is none."""
    return {PIPE_VARIABLE: str(private / "no-mps")} if env else {}


@contextlib.asynccontextmanager
async def shared_gpu(
    mode: ShareGpu,
    *,
    num_cuda_workers: int,
    log: Path,
    warn: Callable[[str], None],
    gpu_files: Sequence[Path] = GPU_FILES,
    start_timeout_s: float = 15.0,
    stop_timeout_s: float = 5.0,
) -> AsyncIterator[dict[str, str]]:
    """Yields the additional environment of workers that use a GPU; empty without MPS. If MPS is not
    possible, "mps" raises ConfigError and other modes warn at most. All workers live inside it."""
    obstacle = _obstacle(num_cuda_workers=num_cuda_workers, gpu_files=gpu_files)
    may_be = mode != "time_slices" and num_cuda_workers > 1 and obstacle is None
    if mode != "mps" and not may_be:
        yield {}
        return
    if obstacle is not None:
        raise ConfigError(f"cluster.share_gpu = 'mps', but {obstacle}; use 'auto' to run without.")
    log.parent.mkdir(parents=True, exist_ok=True)
    if await asyncio.to_thread(ask, "get_server_list", env=os.environ, timeout_s=REPLY_TIMEOUT_S):
        with log.open("a") as file:
            file.write("mps: the CUDA workers share their GPU through an MPS daemon that was")
            file.write(" already there\n")
        yield {PIPE_VARIABLE: os.environ.get(PIPE_VARIABLE, DEFAULT_PIPE)}
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            env = await stack.enter_async_context(
                _daemon(log=log, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s)
            )
        except MpsFailed as failure:
            if mode == "mps":
                raise ConfigError(
                    f"cluster.share_gpu = 'mps', but MPS did not start: {failure} ({log} says"
                    " more); use 'auto' to run without."
                ) from None
            warn(f"MPS did not start, so {COST}: {failure} ({log} says more).")
            env = {}
        yield env


class MpsFailed(Exception):
    """The daemon did not come up."""


def _obstacle(*, num_cuda_workers: int, gpu_files: Sequence[Path]) -> str | None:
    """Why MPS is not possible; None if it is."""
    if num_cuda_workers == 0:
        return "[placement] leaves no worker that uses a GPU"
    if not any(path.exists() for path in gpu_files):
        return "this machine has no NVIDIA GPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not on PATH"
    return None


@contextlib.asynccontextmanager
async def _daemon(
    *, log: Path, start_timeout_s: float, stop_timeout_s: float
) -> AsyncIterator[dict[str, str]]:
    """Run a control daemon; yields the environment of its clients."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-mps-"))  # 0700: others must not connect
    try:
        with log.open("ab") as file:
            guard = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", mps_daemon.__file__),
                *(str(folder), str(start_timeout_s), str(stop_timeout_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # a terminal's Ctrl-C is for the controller
            )
        try:
            assert guard.stdout is not None
            answer = (await guard.stdout.readline()).decode().strip()  # it has a limit of its own
            if answer != "up":
                raise MpsFailed(answer or "its guard process failed")
            yield environment(folder)
        finally:
            await _stop(guard, timeout_s=stop_timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # if the guard could not


async def _stop(guard: asyncio.subprocess.Process, *, timeout_s: float) -> None:
    """Have the guard quit the daemon, then terminate it; then kill both."""
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        await _wait_for_exit(guard, 3 * timeout_s)
    finally:  # also when this wait is cancelled
        if guard.returncode is None:
            guard.terminate()
            await _wait_for_exit(guard, timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)  # the session, in case the guard died
        await guard.wait()


async def _wait_for_exit(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()
