"""A workload with long-tailed completion lengths, made on the spot.

A model with random weights ends a completion with about the same small chance at each token, so
lengths are geometric: most are short, a few run to the limit. A tiny learning rate keeps it so for
the whole run, which makes two runs comparable whatever they learn.
"""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.demo.model import build_tokenizer


def make_long_tailed_model(directory: Path, *, seed: int) -> None:
    """About 1M parameters; the vocabulary's size sets the mean length, since eos is one token of
    it."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that costs nothing and is rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
