"""What the machine has to offer."""

import os


def available_cores() -> int:
    """Cores this process may run on; containers and taskset often allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
