"""`millrace bench engine`: tokens per second of the embedded engine, next to the memory's floor.

Each row generates `batch` completions of random prompts at temperature 1 with logprobs. The floor
is what reading the weights once and the live KV once per step takes at the bandwidth of a large
copy, measured in the same run: no engine that reads both can be faster.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.bench import bench_parser, write_result
from millrace.bench.workloads import (
    chosen_device,
    copy_s,
    described,
    kernel_times,
    make_model,
    shapes,
)
from millrace.config import EngineConfig
from millrace.core.records import Request, Sampling
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.cache import block_bytes
from millrace.inference.embedded.kv.paged_attention import measure_cache
from millrace.inference.embedded.self_test import engine_path
from millrace.models.routing import find_routing


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("engine", on_device=True)
    parser.add_argument(
        "--model", nargs="+", help=f"shapes ({', '.join(shapes())}) or model directories"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="sequences decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, help="of each sequence (512; on a CPU 64)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--decode-steps", type=int, help="decode steps per launch on the device")
    parser.add_argument("--no-compile", action="store_true", help="do not fuse layers")
    parser.add_argument(
        "--routes", action="store_true", help="record the routes of a mixture of experts"
    )
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    parser.add_argument("--profile", action="store_true", help="list what the GPU's time went to")
    args = parser.parse_args(argv)
    device, dtype = chosen_device(args)
    on_gpu = device.type == "cuda"
    if args.profile and not on_gpu:
        parser.error("--profile lists the kernels of a GPU, and there is none")
    rows: list[dict[str, Any]] = []
    for name in args.model or (["qwen3-1.7b", "smollm2-135m"] if on_gpu else ["tiny"]):
        rows += measure(name, args, device=device, dtype=dtype)
    print(_table(rows))
    write_result(rows, args.json)
    return 0


def measure(
    name: str, args: argparse.Namespace, *, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """One row per batch size, all from one engine."""
    on_gpu, prompt_tokens = device.type == "cuda", args.prompt_tokens
    batches = args.batch or ([64, 256] if on_gpu else [8, 32])
    new_tokens = args.new_tokens or (512 if on_gpu else 64)
    sampling = Sampling(max_new_tokens=new_tokens, top_p=args.top_p, top_k=args.top_k)
    options = EmbeddedBackend(compile=not args.no_compile, decode_steps=args.decode_steps)
    started_s = time.perf_counter()
    model, tokenizer = make_model(name, dtype=dtype, device=device, attention=engine_path(device))
    config = EngineConfig(max_sequences=max(batches), max_context=prompt_tokens + new_tokens)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    token_bytes = block_bytes(measure_cache(model).shapes, block_tokens=1, dtype=dtype)
    routing = find_routing(model) if args.routes else None
    more: dict[str, Any] = {"routing": routing, "options": options, "exact": args.exact}
    engine = engine_of(model, tokenizer, config=config, version=0, **more)
    generate = partial(_generate, engine, prompt_tokens=prompt_tokens)
    generate(1, sampling=Sampling(max_new_tokens=1))
    start_s = time.perf_counter() - started_s
    num_bytes = 2**30 if on_gpu else 2**26
    bytes_per_s = 2 * num_bytes / copy_s(num_bytes, device=device)  # read and written
    brief = replace(sampling, max_new_tokens=40)  # truncated sampling has kernels of its own
    rows = []
    for batch in batches:
        generate(batch, sampling=brief)
        before_s = time.perf_counter()
        tokens = generate(batch, sampling=sampling)
        seconds = time.perf_counter() - before_s
        if args.profile:
            print(f"{batch} sequences, prefill included")
            work = partial(generate, batch, sampling=sampling)
            print(kernel_times(work, num_steps=new_tokens))
        # The context grows by one token per step; on average, half of the new tokens are there.
        live = batch * (prompt_tokens + new_tokens / 2)
        floor_s = (weight_bytes + live * token_bytes) / bytes_per_s
        rows.append(
            {
                "model": name,
                **described(device, dtype),
                "batch": batch,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "tokens_per_s": tokens / seconds,
                "floor_tokens_per_s": batch / floor_s,
                "copy_bytes_per_s": bytes_per_s,
                "cold_start_s": start_s,
            }
        )
    return rows


def _generate(engine: EmbeddedEngine, batch: int, *, prompt_tokens: int, sampling: Sampling) -> int:
    """Tokens generated for `batch` different prompts."""
    before = engine.stats().generated_tokens
    # Prompts differ at every call, so that the prefix cache does not help.
    random = np.random.default_rng(before)
    numbers = random.integers(3, 1000, (batch, prompt_tokens)).astype(np.int32)
    for index, prompt in enumerate(numbers):
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=sampling, seed=index, routes_from=0)
        )
    while engine.has_work:
        engine.step()
    return engine.stats().generated_tokens - before


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'model':<14}{'batch':>6}{'tokens/s':>12}{'floor':>12}{'share':>8}{'start s':>9}"]
    for row in rows:
        share = row["tokens_per_s"] / row["floor_tokens_per_s"]
        lines.append(
            f"{Path(row['model']).name:<14}{row['batch']:>6}{row['tokens_per_s']:>12,.0f}"
            f"{row['floor_tokens_per_s']:>12,.0f}{share:>8.0%}{row['cold_start_s']:>9.1f}"
        )
    return "\n".join(lines)
