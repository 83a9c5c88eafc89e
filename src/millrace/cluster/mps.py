"""NVIDIA MPS for the length of a run: kernels of several processes run on a GPU at the same time.

Without it a GPU gives each process time slices, and while it computes for one it does nothing for
the others. Promise: a daemon that this module started never outlives the run, however the run
ends; one that was there before is used and left alone.

Torch-free. Runs on the controller's event loop; the daemon belongs to a process of its own, see
mps_keeper.py.
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
from typing import Literal

from millrace.cluster import mps_daemon as mps_keeper
from millrace.cluster.mps_daemon import ANSWER_S, CONTROL, ask, environment
from millrace.core.errors import ConfigError

GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"  # 0 = normal, 1 = below
COST = "the GPU computes for one process at a time, and engines and trainer wait for each other"


def behind(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker whose kernels let others go first, given what shared_gpu yields.

    The trainer's: its kernels are long and many, and a decode step that queues behind them is late
    for every sequence.
    """
    return {**env, PRIORITY_VARIABLE: "1"} if env else {}


@contextlib.asynccontextmanager
async def shared_gpu(
    mode: Literal["auto", "on", "off"],
    *,
    num_cuda_workers: int,
    log: Path,
    warn: Callable[[str], None],
    gpu_files: Sequence[Path] = GPU_FILES,
    start_timeout_s: float = 15.0,
    stop_timeout_s: float = 5.0,
) -> AsyncIterator[dict[str, str]]:
    """Yields what to add to the environment of workers that use a GPU; nothing without MPS.

    At "auto", what stands in the way of MPS costs a warning at most; at "on" it is a ConfigError.
    Enter it before any worker starts and leave it when all have ended.
    """
    obstacle = _obstacle(num_cuda_workers=num_cuda_workers, gpu_files=gpu_files)
    is_wanted = mode == "on" or (mode == "auto" and num_cuda_workers > 1 and obstacle is None)
    if not is_wanted:
        yield {}
        return
    if obstacle is not None:
        raise ConfigError(f"cluster.mps = 'on', but {obstacle}; use 'auto' to run without.")
    log.parent.mkdir(parents=True, exist_ok=True)
    if await asyncio.to_thread(ask, "get_server_list", env=os.environ, timeout_s=ANSWER_S):
        _note(log, "the CUDA workers share their GPU through the MPS daemon that was already there")
        yield {}  # they find it as we did
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            env = await stack.enter_async_context(
                _daemon(log=log, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s)
            )
        except MpsFailed as failure:
            if mode == "on":
                raise ConfigError(
                    f"cluster.mps = 'on', but MPS did not start: {failure} ({log} says more); use"
                    " 'auto' to run without."
                ) from None
            warn(f"MPS did not start, so {COST}: {failure} ({log} says more).")
            env = {}
        yield env


class MpsFailed(Exception):
    """The daemon did not come up."""


def _obstacle(*, num_cuda_workers: int, gpu_files: Sequence[Path]) -> str | None:
    """Why there can be no MPS; None if there can."""
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
    """A control daemon of our own; yields the environment of its clients."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-mps-"))  # 0700: others must not connect
    try:
        with log.open("ab") as file:
            keeper = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", mps_keeper.__file__),
                *(str(folder), str(start_timeout_s), str(stop_timeout_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # a terminal's Ctrl-C is for the controller
            )
        try:
            await _wait_until_up(keeper)
            yield environment(folder)
        finally:
            await _let_go(keeper, timeout_s=stop_timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # of a keeper that could not


async def _wait_until_up(keeper: asyncio.subprocess.Process) -> None:
    assert keeper.stdout is not None
    answer = (await keeper.stdout.readline()).decode().strip()  # it has a limit of its own
    if answer != "up":
        raise MpsFailed(answer or "its keeper failed")


async def _let_go(keeper: asyncio.subprocess.Process, *, timeout_s: float) -> None:
    """Have the keeper end the daemon: with courtesy, then without, then both are killed."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    try:
        await _ends_within(keeper, 3 * timeout_s)
    finally:  # also when this wait is cancelled
        if keeper.returncode is None:
            keeper.terminate()
            await _ends_within(keeper, timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)  # the session: also what a dead keeper left
        await keeper.wait()


async def _ends_within(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()


def _note(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"mps: {line}\n")
