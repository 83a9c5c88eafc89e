"""What benchmarks measure with: a device, its clock, and models with random weights.

Nothing is downloaded. The long-tailed model ends a completion with about the same small probability
at each token, so lengths are geometric: most are short, and a few reach the limit. A tiny learning
rate keeps the lengths for the whole run, so two runs are comparable whatever they learn.
"""

import argparse
import string
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from millrace.core.records import Completion, Episode, Group, Rollout, Score, Task
from millrace.demo.model import build_model, build_tokenizer
from millrace.models.devices import resolve_device
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model
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


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def shape_of(kind: type[PreTrainedConfig], *sizes: int, **more: Any) -> PreTrainedConfig:
    """`sizes` in the order of _SIZES. Embeddings are tied unless `more` says otherwise."""
    known: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    return kind(**{**known, "tie_word_embeddings": True, **more})


def shapes() -> dict[str, PreTrainedConfig]:
    """The published configurations, by name."""
    untied = {"tie_word_embeddings": False}
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    mixture = {**untied, **experts, "norm_topk_prob": True}
    few = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    return {
        "qwen3-1.7b": shape_of(Qwen3Config, 151936, 2048, 6144, 28, 16, 8, 128, 40960),
        "qwen3-8b": shape_of(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 128, 40960, **untied),
        "qwen3-30b-a3b": shape_of(
            Qwen3MoeConfig, 151936, 2048, 6144, 48, 32, 4, 128, 40960, **mixture
        ),
        "smollm2-135m": shape_of(LlamaConfig, 49152, 576, 1536, 30, 9, 3, 64, 8192),
        "tiny": shape_of(Qwen3Config, 1024, 128, 512, 4, 4, 2, 32, 2048),
        "tiny-moe": shape_of(Qwen3MoeConfig, 1024, 128, 512, 2, 4, 2, 32, 2048, **few),
    }


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
    return shape_of(Qwen3Config, 2048, hidden, mlp, layers, heads, heads, 64, 1024)


def with_positions(config: PreTrainedConfig, num_positions: int) -> PreTrainedConfig:
    """The configuration, changed so that it has at least so many positions: by YaRN."""
    original: int = config.max_position_embeddings
    if num_positions > original:
        factors = {"factor": num_positions / original, "original_max_position_embeddings": original}
        config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", **factors}
        config.max_position_embeddings = num_positions
    return config


def make_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionPath,
    num_positions: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of that shape, or the one in the directory `name`, with a tokenizer. A shape gets at
    least `num_positions`."""
    if name not in shapes() and Path(name).is_dir():
        model = load_model(name, dtype=dtype, device=device, attention=attention)
        return model, load_tokenizer(name, trust_remote_code=False)
    config = with_positions(shape_named(name), num_positions)
    torch.manual_seed(0)
    with torch.device(device):  # drawing the weights on the host may take minutes
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.name
        )
    return model.eval(), build_tokenizer()


def completion_of(tokens: np.ndarray, logprobs: np.ndarray, **more: Any) -> Completion:
    """Tokens that version 0 sampled."""
    return Completion(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish="length",
        text="",
        **more,
    )


def group_of(number: int, rollouts: Iterable[Rollout], advantages: np.ndarray) -> Group:
    return Group(
        number=number,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        scores=tuple(Score(total=float(value), parts={}) for value in advantages),
        advantages=advantages.astype(np.float32),
    )


def best_s(work: Callable[[], Any], *, repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of `repeats` calls; waits for the device before reading the clock."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(repeats):
        wait()
        before_s = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - before_s)
    return best


def kernel_times(work: Callable[[], Any], *, num_steps: int) -> str:
    """A table of what the GPU's time went to, per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    lines = [f"{'ms/step':>8}{'calls/step':>12}  kernel"]
    for kernel in kernels[:24]:
        milliseconds = kernel.device_time_total / 1000 / num_steps
        lines.append(f"{milliseconds:>8.3f}{kernel.count / num_steps:>12.1f}  {kernel.key[:90]}")
    total = sum(kernel.device_time_total for kernel in kernels) / 1000 / num_steps
    return "\n".join([*lines, f"{total:>8.3f}{'':>12}  all kernels"])


def copy_s(num_bytes: int, *, device: torch.device, repeats: int = 10) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return best_s(lambda: target.copy_(source), repeats=repeats, device=device)


def make_long_tailed_model(directory: Path, *, seed: int, **sizes: int) -> None:
    """A model of about 1M parameters, or with other `sizes`. EOS is one of 64 tokens, so the mean
    length is 64."""
    tokenizer = build_tokenizer(string.ascii_letters + string.digits)
    build_model(tokenizer, seed=seed, **sizes).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def distinct_share(completions: list[str], **columns: object) -> list[float]:
    """A reward that is cheap and rarely the same for two completions."""
    return [len(set(text)) / (len(text) + 1) for text in completions]
