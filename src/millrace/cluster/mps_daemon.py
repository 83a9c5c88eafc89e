"""The process that keeps NVIDIA's MPS control daemon: `python -I mps_keeper.py DIR START_S STOP_S`.

Promise: when the controller lets go of this process's stdin, by closing it or by dying however it
died, the daemon is asked to quit, and after twice STOP_S at most it, the servers it started and DIR
are gone. SIGTERM: the same, without asking. Should the keeper itself be killed, the kernel kills
the daemon.

It says "up", or why not, in one line on stdout. What else it has to say, and the daemon's own logs
at the end, goes to stderr, which is logs/mps.log of the run. Single-threaded; standard library
only, so that it starts at once.
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
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
ANSWER_S = 5.0  # for one question
POLL_S = 0.05
WATCH_S = 1.0  # how soon a dead daemon is noticed
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def environment(folder: Path) -> dict[str, str]:
    """What makes a process find the daemon whose files lie in `folder`."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def ask(command: str, *, env: Mapping[str, str], timeout_s: float) -> bool:
    """Give the daemon a command; False if there is none that takes it in time."""
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
    signal.signal(signal.SIGTERM, _hurry)
    # What the daemon leaves behind becomes our child, not init's; so we can end it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    env = {**os.environ, **environment(folder)}
    # Servers must see all GPUs: they number them before the workers' own CUDA_VISIBLE_DEVICES
    # picks, and one number would be applied twice.
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
            preexec_fn=_die_with_keeper,
        )
        try:
            trouble = _wait_until_up(daemon, env=env, timeout_s=start_timeout_s)
            print(trouble or "up", flush=True)
            if trouble is None:
                _log(f"the CUDA workers share their GPU through MPS, daemon process {daemon.pid}")
                _watch(daemon)
        finally:
            _stop(daemon, env=env, timeout_s=stop_timeout_s)
    finally:
        for log in sorted(folder.glob("log/*.log")):
            _log(f"{log.name}:\n{log.read_text(errors='replace')}")
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_keeper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _hurry(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _wait_until_up(
    daemon: subprocess.Popen[bytes], *, env: Mapping[str, str], timeout_s: float
) -> str | None:
    """None once it answers; else why it never will."""
    deadline_s = time.monotonic() + timeout_s
    while daemon.poll() is None and time.monotonic() < deadline_s:
        if ask("get_server_list", env=env, timeout_s=ANSWER_S):
            return None
        if _is_let_go(POLL_S):
            return "the controller is gone"
    if daemon.poll() is not None:
        return f"{CONTROL} exited with code {daemon.returncode}"
    return f"{CONTROL} did not answer within {timeout_s:g} s"


def _watch(daemon: subprocess.Popen[bytes]) -> None:
    """Return when the controller lets go, or there is nothing left to keep."""
    while not _is_let_go(WATCH_S):
        if daemon.poll() is not None:
            _log(f"the daemon exited with code {daemon.returncode} in the middle of the run")
            return


def _is_let_go(timeout_s: float) -> bool:
    """True as soon as the controller's end of stdin is closed; nothing is ever written to it."""
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
    # The children of a process that is killed become ours, so this ends when nobody is left.
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # "pid (name) state parent ...", where the name may hold anything.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(stat.parent.name)


def _log(line: str) -> None:
    print(f"mps: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), start_timeout_s=float(sys.argv[2]), stop_timeout_s=float(sys.argv[3]))
