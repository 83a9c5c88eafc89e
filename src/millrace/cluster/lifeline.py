"""Ties a worker's life to the controller's where the kernel does not: see leash.py for Linux.

Promise: a worker never outlives the process that started it, however that process ended.
"""

import os
import sys
import threading
import time

PARENT_POLL_S = 0.25


def die_with(parent: int) -> None:
    """End this process as soon as the process `parent`, which must have started it, is gone."""
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent,), name="watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
