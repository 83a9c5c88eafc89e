"""Timing of work on a device, and a workload with long-tailed completion lengths.

A model with random weights ends a completion with about the same small probability at each token,
so lengths are geometric: most are short, and a few reach the limit. A tiny learning rate keeps the
lengths for the whole run, so two runs are comparable whatever they learn.
"""

import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from millrace.demo.model import build_model, build_tokenizer


def best_s(work: Callable[[], Any], *, repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of `repeats` calls; waits for the device before reading the clock."""
    best = float("inf")
    for _ in range(repeats):
        wait_for(device)
        before_s = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - before_s)
    return best


def copy_s(num_bytes: int, *, device: torch.device, repeats: int = 10) -> float:
    """Seconds of one copy of `num_bytes` within the memory of the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return best_s(lambda: target.copy_(source), repeats=repeats, device=device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_long_tailed_model(directory: Path, *, seed: int) -> None:
    """A model of about 1M parameters. EOS is one of 64 tokens, so the mean length is 64."""
    tokenizer = build_tokenizer(string.ascii_letters + string.digits)
    build_model(tokenizer, seed=seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that is cheap and rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
