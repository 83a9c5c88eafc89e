"""Cost of a LoRA adapter in an engine, merged and unmerged, per token and per swap.

    python benchmarks/adapters.py --model qwen3-1.7b --rank 32 --json rows.json

The rows are: no adapter, one merged adapter, one unmerged adapter, and 4 or 8 unmerged adapters
that the sequences use in turn. Swaps replace the policy's adapter by tensors on the device, as
weights.transport = "ipc" delivers them. The model has random weights.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.bench.workloads import make_model
from millrace.config import EngineConfig, LoraConfig
from millrace.core.records import Request, Sampling
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path
from millrace.models.devices import resolve_device
from millrace.models.lora.factors import Adapter, adapter_of

PROMPT_TOKENS = 16
NUM_SWAPS = 20


class AdapterCase(NamedTuple):
    name: str
    merges: bool = False
    num_unmerged: int = 0  # including the policy's adapter


CASES = (
    AdapterCase("none"),
    AdapterCase("merged", merges=True),
    AdapterCase("unmerged", num_unmerged=1),
    AdapterCase("4 unmerged", num_unmerged=4),
    AdapterCase("8 unmerged", num_unmerged=8),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="LoRA in an engine, merged and unmerged.")
    parser.add_argument("--model", default="qwen3-1.7b", help="a shape of `millrace bench engine`")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(measure(case, args))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        torch.compiler.reset()  # all engines together would exceed the recompilation limit
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def measure(case: AdapterCase, args: argparse.Namespace) -> dict[str, Any]:
    device = resolve_device(args.device)
    model, tokenizer = make_model(
        args.model, dtype=getattr(torch, args.dtype), device=device, attention=engine_path(device)
    )
    policy = adapter_of(model, LoraConfig(rank=args.rank, alpha=2 * args.rank, dora=args.dora))
    adapters = {
        str(number) if number else None: replace(policy, tensors=_random(policy, device=device))
        for number in range(case.num_unmerged)
    }
    engine = engine_of(
        model,
        tokenizer,
        config=EngineConfig(max_sequences=args.batch, max_context=PROMPT_TOKENS + args.new_tokens),
        version=0,
        merger=AdapterMerger(model, policy) if case.merges else None,
        adapters=adapters,
    )
    swaps: list[float] = []
    if case.merges or adapters:
        versions = [_random(policy, device=device) for _ in range(2)]
        for version in range(NUM_SWAPS):
            before_s = time.perf_counter()
            engine.swap(versions[version % 2], version=version)
            swaps.append((time.perf_counter() - before_s) * 1000)
    _generate(engine, args.batch, names=list(adapters), new_tokens=8)
    before_s = time.perf_counter()
    num_tokens = _generate(engine, args.batch, names=list(adapters), new_tokens=args.new_tokens)
    return {
        "adapters": case.name,
        "tokens_per_s": round(num_tokens / (time.perf_counter() - before_s)),
        "swap_ms_p50": round(median(swaps), 3) if swaps else None,
        "model": args.model,
        "rank": args.rank,
        "dora": args.dora,
        "batch": args.batch,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _random(adapter: Adapter, *, device: torch.device) -> Mapping[str, Tensor]:
    """Random values that are small enough to keep the logits finite."""
    shapes = adapter.shapes().items()
    return {name: 1e-2 * torch.rand(shape, device=device) + 1e-3 for name, shape in shapes}


def _generate(
    engine: EmbeddedEngine, batch: int, *, names: Sequence[str | None], new_tokens: int
) -> int:
    prompts = np.random.default_rng(0).integers(3, 1000, (batch, PROMPT_TOKENS)).astype(np.int32)
    sampling = Sampling(max_new_tokens=new_tokens)
    for index, prompt in enumerate(prompts):
        name = names[index % len(names)] if names else None
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=sampling, seed=index, adapter=name)
        )
    before = engine.stats().generated_tokens
    while engine.has_work:
        engine.step()
    return engine.stats().generated_tokens - before


if __name__ == "__main__":
    sys.exit(main())
