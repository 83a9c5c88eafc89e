"""Ends a process when its parent dies, however the parent dies.

On Linux the kernel does it: a child sets its parent-death signal before it becomes the program,
because the setting survives exec and works even while the child is stopped. Elsewhere a thread of
the child polls its parent.

Run as a file, `python parent_death.py PARENT PROGRAM ...`, it becomes the program. It imports the
standard library only, so that this costs little.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.25


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """The command that runs `command` as a child of the calling thread, and no longer than it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def set_parent_death_signal(parent: int) -> None:
    """On Linux, have the kernel kill this process when `parent` ends; exit if it has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the setting took effect
        os._exit(1)


def exit_with_parent(parent: int) -> None:
    """Where the kernel does not do it, exit when `parent`, which started this process, ends."""

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    if sys.platform != "linux":
        threading.Thread(target=poll, name="parent-poll", daemon=True).start()


def main() -> None:
    parent, *command = sys.argv[1:]
    set_parent_death_signal(int(parent))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
