"""Ties a worker's life to the controller's.

Promise: a worker never outlives the process that started it, however that process ended.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_POLL_S = 0.25
PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process as soon as the process `parent`, which must have started it, is gone."""
    if sys.platform == "linux":
        # By the kernel: no thread of ours runs while user code holds the interpreter.
        # It fires when the starting thread ends, so the hub starts workers from its loop's thread.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # For other systems, and for a controller that died before prctl took effect.
    threading.Thread(target=_watch, args=(parent,), name="watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
