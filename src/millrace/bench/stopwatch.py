"""How long work takes on a device: it has ended before the clock is read. The best of several.

A workload with long-tailed completion lengths, made on the spot.

A model with random weights ends a completion with about the same small chance at each token, so
lengths are geometric: most are short, a few run to the limit. A tiny learning rate keeps it so for
the whole run, which makes two runs comparable whatever they learn.
"""

import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from millrace.demo.model import build_model, build_tokenizer


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


def make_long_tailed_model(directory: Path, *, seed: int) -> None:
    """About 1M parameters. Eos is one token of 64, so completions have 64 tokens on average."""
    tokenizer = build_tokenizer(string.ascii_letters + string.digits)
    build_model(tokenizer, seed=seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that costs nothing and is rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
