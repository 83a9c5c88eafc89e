"""`millrace bench engine`: tokens per second of the embedded engine, next to the memory's floor.

Each row generates `batch` completions of random prompts at temperature 1 with logprobs. The floor
is what reading the weights once and the live KV once per step takes at the bandwidth of a large
copy, measured in the same run: no engine that reads both can be faster.

Prefill and decoding are also measured alone: prefill by completions of one token, as a share of the
rate of a large matrix product, and decoding with the same prompts again, which the prefix cache
has, as a share of the floor.
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
from millrace.bench.train import flops_of, matmul_rate
from millrace.bench.workloads import (
    chosen_device,
    copy_s,
    described,
    kernel_times,
    make_model,
    shapes,
)
from millrace.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.records import Request, Sampling
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of, kv_dtype_of
from millrace.inference.embedded.decode.fp8_layers import quantize_layers
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
    parser.add_argument(
        "--kv-bytes", type=lambda text: int(float(text)), help="of the KV cache, such as 120e9"
    )
    parser.add_argument("--quantization", choices=["fp8"], help="of the layers' products")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
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
    context = prompt_tokens + new_tokens
    sampling = Sampling(max_new_tokens=new_tokens, top_p=args.top_p, top_k=args.top_k)
    options = _options(args)
    started_s = time.perf_counter()
    model, tokenizer = make_model(name, dtype=dtype, device=device, attention=engine_path(device))
    config = EngineConfig(max_sequences=max(batches), max_context=context)
    prompt_flops = flops_of(model, np.array([prompt_tokens]), num_targets=1)
    if options.quantization == "fp8":
        quantize_layers(model)
    kv_dtype = kv_dtype_of(options, model)
    token_bytes = block_bytes(measure_cache(model).shapes, block_tokens=1, dtype=kv_dtype)
    routing = find_routing(model) if args.routes else None
    more: dict[str, Any] = {"routing": routing, "options": options, "exact": args.exact}
    engine = engine_of(model, tokenizer, config=config, version=0, **more)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    _check_room(engine, max(batches), context=context, block_tokens=options.block_tokens)
    _generate(engine, _prompts(engine, 1, prompt_tokens), Sampling(max_new_tokens=1))
    start_s = time.perf_counter() - started_s
    num_bytes = 2**30 if on_gpu else 2**26
    bytes_per_s = 2 * num_bytes / copy_s(num_bytes, device=device)  # read and written
    matmul_flops_per_s = matmul_rate(device, dtype)

    def floor(batch: int, context: float) -> float:
        return batch * bytes_per_s / (weight_bytes + batch * context * token_bytes)

    rows = []
    for batch in batches:
        measured = _measure_batch(engine, batch, prompt_tokens, sampling, profile=args.profile)
        decode_floor = floor(batch, measured["decode_context"])
        flops_per_s = measured["prefill_tokens_per_s"] / prompt_tokens * prompt_flops
        rows.append(
            {
                "model": name,
                **described(device, dtype),
                "batch": batch,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "quantization": args.quantization,
                "kv_cache_dtype": args.kv_cache_dtype,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                **measured,
                # The context grows by one token per step; on average, half of them are there.
                "floor_tokens_per_s": floor(batch, prompt_tokens + new_tokens / 2),
                "prefill_share": flops_per_s / matmul_flops_per_s,
                "decode_share": measured["decode_tokens_per_s"] / decode_floor,
                "copy_bytes_per_s": bytes_per_s,
                "matmul_flops_per_s": matmul_flops_per_s,
                "cold_start_s": start_s,
            }
        )
    return rows


def _options(args: argparse.Namespace) -> EmbeddedBackend:
    return EmbeddedBackend(
        compile=not args.no_compile,
        decode_steps=args.decode_steps,
        kv_bytes=args.kv_bytes,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )


def _check_room(engine: EmbeddedEngine, batch: int, *, context: int, block_tokens: int) -> None:
    """Refuse sequences that do not fit into the KV cache together: some would be preempted."""
    needed, blocks = batch * -(-context // block_tokens), engine.stats().free_blocks
    if blocks is not None and blocks < needed:
        raise ConfigError(
            f"A KV cache of {blocks} blocks does not hold {batch} sequences of {context} tokens,"
            f" which need {needed}; raise --kv-bytes, or lower --batch."
        )


def _measure_batch(
    engine: EmbeddedEngine, batch: int, prompt_tokens: int, sampling: Sampling, *, profile: bool
) -> dict[str, float]:
    """The rates of prefill alone, of decoding alone, and of both together."""
    new = partial(_prompts, engine, batch, prompt_tokens)
    one_token = replace(sampling, max_new_tokens=1)
    # Captures graphs: truncated sampling has kernels of its own.
    _generate(engine, new(), replace(sampling, max_new_tokens=40))
    engine.use_idle_time()
    before_s = time.perf_counter()
    tokens = _generate(engine, new(), sampling)
    both_s = time.perf_counter() - before_s
    if profile:
        print(f"{batch} sequences, prefill included")
        work = partial(_generate, engine, new(), sampling)
        print(kernel_times(work, num_steps=sampling.max_new_tokens))
        print(f"prefill of {batch} sequences")
        print(kernel_times(partial(_generate, engine, new(), one_token), num_steps=1))
    prompts = new()
    before_s = time.perf_counter()
    _generate(engine, prompts, one_token)
    prefill_s = time.perf_counter() - before_s
    # The prefix cache has all prompts now, except for their last tokens.
    start, read = engine.stats(), 0
    _add(engine, prompts, sampling)
    while engine.has_work and read < batch * (prompt_tokens - 1):
        engine.step()
        stats = engine.stats()
        read = stats.cached_tokens + stats.prefill_tokens
        read -= start.cached_tokens + start.prefill_tokens
    first = engine.stats().generated_tokens - start.generated_tokens
    before_s = time.perf_counter()
    _finish(engine)
    decode_s = time.perf_counter() - before_s
    decoded = engine.stats().generated_tokens - start.generated_tokens - first
    return {
        "tokens_per_s": tokens / both_s,
        "prefill_tokens_per_s": batch * prompt_tokens / prefill_s,
        "decode_tokens_per_s": decoded / decode_s,
        "decode_context": prompt_tokens + (first / batch + sampling.max_new_tokens) / 2,
    }


def _prompts(engine: EmbeddedEngine, batch: int, prompt_tokens: int) -> np.ndarray:
    """Different prompts at every call, so that the prefix cache does not help."""
    random = np.random.default_rng(engine.stats().generated_tokens)
    return random.integers(3, 1000, (batch, prompt_tokens)).astype(np.int32)


def _add(engine: EmbeddedEngine, prompts: np.ndarray, sampling: Sampling) -> None:
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=sampling, seed=index, routes_from=0)
        )


def _finish(engine: EmbeddedEngine) -> None:
    while engine.has_work:
        engine.step()


def _generate(engine: EmbeddedEngine, prompts: np.ndarray, sampling: Sampling) -> int:
    """The number of generated tokens."""
    before = engine.stats().generated_tokens
    _add(engine, prompts, sampling)
    _finish(engine)
    return engine.stats().generated_tokens - before


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'model':<14}{'batch':>6}{'tokens/s':>12}{'floor':>12}{'share':>7}{'prefill/s':>12}"
        f"{'matmul':>8}{'decode/s':>12}{'floor':>7}{'start s':>9}"
    ]
    for row in rows:
        share = row["tokens_per_s"] / row["floor_tokens_per_s"]
        lines.append(
            f"{Path(row['model']).name:<14}{row['batch']:>6}{row['tokens_per_s']:>12,.0f}"
            f"{row['floor_tokens_per_s']:>12,.0f}{share:>7.0%}"
            f"{row['prefill_tokens_per_s']:>12,.0f}{row['prefill_share']:>8.0%}"
            f"{row['decode_tokens_per_s']:>12,.0f}{row['decode_share']:>7.0%}"
            f"{row['cold_start_s']:>9.1f}"
        )
    return "\n".join(lines)
