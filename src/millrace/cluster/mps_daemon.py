"""The guard of NVIDIA's MPS control daemon: `python -I mps_daemon.py DIR START_S STOP_S`.

Promise: when the controller closes stdin of this process or dies, the guard asks the daemon to
quit; after at most twice STOP_S the daemon, its servers and DIR are gone. SIGTERM does the same
without asking. If the guard itself is killed, the kernel kills the daemon.

It prints "up", or why the daemon did not start, on stdout. Messages and, at the end, the daemon's
own logs go to stderr, which is logs/mps.log of the run. It imports the standard library only.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
REPLY_TIMEOUT_S = 5.0  # for one command
POLL_S = 0.05
WATCH_S = 1.0  # how often the daemon is checked
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def environment(folder: Path) -> dict[str, str]:
    """The environment of clients of the daemon whose files are in `folder`."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def ask(command: str, *, env: Mapping[str, str], timeout_s: float) -> bool:
    """Send a command to the daemon; False if it does not accept it in time."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{command}\n",
            env=env,
            timeout=timeout_s,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0


def main(folder: Path, *, start_timeout_s: float, stop_timeout_s: float) -> None:
    signal.signal(signal.SIGTERM, _terminate)
    # Orphans of the daemon become children of this process, which can end them.
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    env = {**os.environ, **environment(folder)}
    # Servers must see all GPUs: CUDA_VISIBLE_DEVICES of the workers selects among those of the
    # servers, so the same setting would be applied twice.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        (folder / "pipe").mkdir()
        (folder / "log").mkdir()
        daemon = subprocess.Popen(
            [CONTROL, "-f"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        try:
            trouble = _wait_until_up(daemon, env=env, timeout_s=start_timeout_s)
            print(trouble or "up", flush=True)
            if trouble is None:
                _log(f"the CUDA workers share their GPU through MPS, daemon process {daemon.pid}")
                while daemon.poll() is None and not _is_released(WATCH_S):
                    pass
                if daemon.poll() is not None:
                    _log(f"the daemon exited with code {daemon.returncode} during the run")
        finally:
            _stop(daemon, env=env, timeout_s=stop_timeout_s)
    finally:
        for log in sorted(folder.glob("log/*.log")):
            _log(f"{log.name}:\n{log.read_text(errors='replace')}")
        shutil.rmtree(folder, ignore_errors=True)


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _wait_until_up(
    daemon: subprocess.Popen[bytes], *, env: Mapping[str, str], timeout_s: float
) -> str | None:
    """Wait until the daemon answers; returns None, or why it does not."""
    deadline_s = time.monotonic() + timeout_s
    while daemon.poll() is None and time.monotonic() < deadline_s:
        if ask("get_server_list", env=env, timeout_s=REPLY_TIMEOUT_S):
            return None
        if _is_released(POLL_S):
            return "the controller has ended"
    if daemon.poll() is not None:
        return f"{CONTROL} exited with code {daemon.returncode}"
    return f"{CONTROL} did not answer within {timeout_s:g} s"


def _is_released(timeout_s: float) -> bool:
    """Whether the controller has closed stdin, to which nothing is ever written."""
    readable, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(readable)


def _stop(daemon: subprocess.Popen[bytes], *, env: Mapping[str, str], timeout_s: float) -> None:
    try:
        if daemon.poll() is None and ask("quit", env=env, timeout_s=timeout_s):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout_s)
        if daemon.poll() is None:
            _log("the daemon did not quit and is killed")
    finally:
        _kill_descendants()


def _kill_descendants() -> None:
    # Children of a killed process become children of this one, so this ends when none is left.
    with contextlib.suppress(ChildProcessError):
        while True:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # the process ended meanwhile
                    # "pid (name) state parent ...", where the name may hold anything.
                    parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
                    if int(parent) == os.getpid():
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            os.waitpid(-1, 0)


def _log(line: str) -> None:
    print(f"mps: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), start_timeout_s=float(sys.argv[2]), stop_timeout_s=float(sys.argv[3]))
