"""The matrix products of decode steps: Millrace's kernel, torch, and reading the weights once.

    python benchmarks/decode_products.py --models smollm2-135m qwen3-1.7b qwen3-8b --rows 64
    python benchmarks/decode_products.py --models qwen3-8b --rows 64 --tilings

Needs CUDA. Each row is one projection of a decoder layer, in bfloat16: microseconds of the tiling
that the engine uses, of torch (with the activation, where the kernel computes it), and of reading
the weights at the bandwidth of a large copy. Calls follow each other in a CUDA graph, each with
other weights, so that none are in the L2 cache. `--tilings` also prints the fastest of all tilings.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.bench import write_result
from millrace.bench.workloads import copy_s, shape_named
from millrace.inference.embedded.decode.tilings import Tiling, tiling_of

DTYPE = torch.bfloat16
WEIGHT_BYTES = 1.5e8  # of the different weights of a graph; more than an L2 cache
MAX_PARTS = 8


class Projection(NamedTuple):
    name: str
    num_out: int
    num_in: int
    is_gated: bool = False
    max_parts: int = 1


def projections(model: str) -> Iterator[Projection]:
    config = shape_named(model)
    dim, hidden, inner = config.head_dim, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    yield Projection("query, key, value", (heads + 2 * kv_heads) * dim, hidden)
    yield Projection("attention output", hidden, heads * dim, max_parts=MAX_PARTS)
    yield Projection("gate, up", 2 * inner, hidden, is_gated=True)
    yield Projection("down", hidden, inner, max_parts=MAX_PARTS)


def tilings(projection: Projection, *, rows: int) -> Iterator[Tiling]:
    for columns, depth, warps, stages in product((16, 32, 64, 128), (64, 128), (4, 8), (3, 4, 5)):
        num_tiles = -(-projection.num_out // (columns * (1 + projection.is_gated)))
        for parts in (1, 2, 4, 8):
            is_whole = projection.num_in % (parts * depth) == 0
            if parts <= projection.max_parts and is_whole and num_tiles * parts >= 24:
                yield Tiling(columns, depth, parts, warps, stages, rows)


def measure(model: str, projection: Projection, args: argparse.Namespace) -> dict[str, Any]:
    from millrace.inference.embedded.decode.kernels import fused_kernels  # imports triton

    _, num_out, num_in, is_gated, max_parts = projection
    num_bytes = num_out * num_in * DTYPE.itemsize
    copies = max(4, min(96, int(WEIGHT_BYTES / num_bytes)))
    weights = [torch.randn(num_out, num_in, dtype=DTYPE, device="cuda") for _ in range(copies)]
    x = torch.randn(args.rows, num_in, dtype=DTYPE, device="cuda")

    def by_torch(weight: Tensor) -> Tensor:
        output = F.linear(x, weight)
        return fused_kernels.gate(output, dtype=DTYPE)[0] if is_gated else output

    def by_kernel(tiling: Tiling) -> float:
        options = {"is_gated": is_gated, "tiling": tiling}
        dtype = torch.float32 if max_parts > 1 else DTYPE
        return call_us(
            lambda weight: fused_kernels.product((x, None), (weight, None), dtype=dtype, **options),
            weights,
        )

    chosen = tiling_of(
        (args.rows, num_out // 2 if is_gated else num_out, num_in),
        itemsize=DTYPE.itemsize,
        shared_bytes=shared_bytes(),
        is_gated=is_gated,
        max_parts=max_parts,
    )
    row = {
        "model": model,
        "rows": args.rows,
        "projection": projection.name,
        "kernel_us": None if chosen is None else by_kernel(chosen),
        "torch_us": call_us(by_torch, weights),
        "floor_us": 1e6 * num_bytes / (2 * 2**30 / copy_s(2**30, device=x.device)),
    }
    if args.tilings:
        programs = tilings(projection, rows=16 if args.rows <= 16 else 64)
        found = [(by_kernel(t), t) for t in programs if fits(t, projection)]
        row["best_us"], row["best"] = min(found)
    return row


def fits(tiling: Tiling, projection: Projection) -> bool:
    own = {"itemsize": DTYPE.itemsize, "is_gated": projection.is_gated}
    return tiling.shared_bytes(**own) <= shared_bytes()


def shared_bytes() -> int:
    """Of a program, on this GPU."""
    return torch.cuda.get_device_properties(0).shared_memory_per_block_optin


def call_us(work: Callable[[Tensor], Any], weights: Sequence[Tensor]) -> float:
    """Microseconds of a call; the fastest of three passes over all weights."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work(weights[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(weights))
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrix products of decode steps, on CUDA.")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tilings", action="store_true", help="also try all tilings")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for projection in projections(model):
            rows.append(measure(model, projection, args))
            print("  ".join(f"{key} {show(value)}" for key, value in rows[-1].items()), flush=True)
    write_result(rows, args.json)


def show(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
