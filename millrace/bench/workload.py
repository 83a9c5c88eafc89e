"""A workload with long-tailed completion lengths, made on the spot.

A model with random weights ends a completion with about the same small chance at each token, so
lengths are geometric: most are short, a few run to the limit. A tiny learning rate keeps it so for
the whole run, which makes two runs comparable whatever they learn.
"""

import string
from pathlib import Path

from millrace.demo.model import build_model, build_tokenizer


def make_long_tailed_model(directory: Path, *, seed: int) -> None:
    """About 1M parameters. Eos is one token of 64, so completions have 64 tokens on average."""
    tokenizer = build_tokenizer(string.ascii_letters + string.digits)
    build_model(tokenizer, seed=seed).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that costs nothing and is rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
