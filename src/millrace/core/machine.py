"""The clock and the CPU cores of the machine.

A run uses the real clock; tests and simulators use their own.
"""

import asyncio
import os
import time
from typing import Protocol


def available_cores() -> int:
    """Cores this process may run on; containers and taskset often allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since a fixed but arbitrary moment; never goes back."""

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


REAL_CLOCK = RealClock()
