"""How long work takes on a device: it has ended before the clock is read. The best of several."""

import time
from collections.abc import Callable
from typing import Any

import torch


def best_s(work: Callable[[], Any], *, repeats: int, device: torch.device) -> float:
    """The fastest of so many."""
    best = float("inf")
    for _ in range(repeats):
        wait_for(device)
        before_s = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - before_s)
    return best


def copy_s(num_bytes: int, *, device: torch.device, repeats: int = 10) -> float:
    """One copy of as many bytes within the memory of the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return best_s(lambda: target.copy_(source), repeats=repeats, device=device)


def wait_for(device: torch.device) -> None:
    """Until it has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
