"""`millrace bench NAME`: measurements on this machine. This module is torch-free."""

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHES = {
    "chaos": "kill processes of a run at random, and check that nothing is lost",
    "engine": "tokens per second of the embedded engine, next to the memory's floor",
    "fidelity": "logprobs that differ between engine and trainer, bit by bit",
    "pipeline": "the same work synchronously and asynchronously, on the same cores",
    "ranks": "whether several trainer ranks compute what one rank computes",
    "sync": "what new weights cost, per transport, while an engine decodes",
    "train": "tokens per second and FLOP/s of the trainer's step, next to matmul's",
}


def bench_parser(name: str, *, on_device: bool = False) -> ArgumentParser:
    """A parser with the options that benches share."""
    what = BENCHES[name]
    description = f"{what[0].upper()}{what[1:]}."
    parser = ArgumentParser(prog=f"millrace bench {name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    if on_device:
        parser.add_argument("--device", default="auto")
        dtypes = ["float32", "bfloat16", "float16"]
        parser.add_argument("--dtype", choices=dtypes, help="bfloat16; on a CPU float32")
    return parser


def write_result(result: Any, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def show_result(result: Mapping[str, Any], path: Path | None) -> None:
    """Print a line for each value, and write the JSON file."""
    for name, value in result.items():
        print(f"{name:<24}{value:,.3g}" if isinstance(value, float) else f"{name:<24}{value}")
    write_result(result, path)
