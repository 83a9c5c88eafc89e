"""What benchmarks measure with: a device, its clock, and models with random weights.

Nothing is downloaded. The long-tailed model ends a completion with about the same small probability
at each token, so lengths are geometric: most are short, and a few reach the limit. A tiny learning
rate keeps the lengths for the whole run, so two runs are comparable whatever they learn.
"""

import argparse
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace.core.errors import ConfigError
from millrace.demo.model import build_model, build_tokenizer
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model, resolve_device
from millrace.models.support import AttentionPath


def chosen_device(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The device of the options, and the data type that suits it."""
    device = resolve_device(args.device)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return device, getattr(torch, dtype)


def described(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Device and data type, as results state them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "dtype": str(dtype).removeprefix("torch.")}


def shapes() -> dict[str, PreTrainedConfig]:
    """The published configurations, by name."""
    return {
        "qwen3-1.7b": _qwen3(151936, 2048, 6144, layers=28, heads=16, kv=8, dim=128, length=40960),
        "qwen3-8b": _qwen3(
            151936, 4096, 12288, layers=36, heads=32, kv=8, dim=128, length=40960, tied=False
        ),
        "qwen3-30b-a3b": Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,  # pyright: ignore[reportCallIssue] - a field of its own class
            max_position_embeddings=40960,
            tie_word_embeddings=False,
        ),
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        "tiny": _qwen3(1024, 128, 512, layers=4, heads=4, kv=2, dim=32, length=2048),
    }


def _qwen3(
    vocab: int,
    hidden: int,
    mlp: int,
    *,
    layers: int,
    heads: int,
    kv: int,
    dim: int,
    length: int,
    tied: bool = True,
) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim,
        max_position_embeddings=length,
        tie_word_embeddings=tied,
    )


def shape_named(name: str) -> PreTrainedConfig:
    """A known shape such as "qwen3-1.7b", or a number of parameters such as "100e6"."""
    if name in shapes():
        return shapes()[name]
    try:
        num_parameters = float(name)
    except ValueError:
        raise ConfigError(
            f"--model = {name!r} is not known; use {', '.join(shapes())}, a number of parameters"
            " such as 100e6, or a model directory."
        ) from None
    hidden = 1024 if num_parameters < 1e9 else 2048
    per_layer = 14 * hidden**2  # attention 4, MLP 3 x 3 1/3
    layers = max(1, round((num_parameters - 2048 * hidden) / per_layer))
    heads, mlp = hidden // 64, hidden * 10 // 3
    return _qwen3(2048, hidden, mlp, layers=layers, heads=heads, kv=heads, dim=64, length=1024)


def make_model(
    name: str, *, dtype: torch.dtype, device: torch.device, attention: AttentionPath
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of that shape, or the one in the directory `name`, with a tokenizer."""
    if name not in shapes() and Path(name).is_dir():
        model = load_model(name, dtype=dtype, device=device, attention=attention)
        return model, load_tokenizer(name, trust_remote_code=False)
    torch.manual_seed(0)
    with torch.device(device):  # drawing the weights on the host may take minutes
        model = AutoModelForCausalLM.from_config(
            shape_named(name), dtype=dtype, attn_implementation=attention.name
        )
    return model.eval(), build_tokenizer()


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
