"""Share of the trained weights whose updates are lost when they are rounded to 16 bits.

    python benchmarks/rounding.py smollm2 --learning-rate 5e-6 --steps 12

A checkpoint in bfloat16 puts every master weight exactly on a bfloat16 number. AdamW moves a weight
by at most about the learning rate per step. Until learning rate x steps exceeds half the distance
to the next number, rounding restores the old value, and neither engines nor the trainer's own
forward passes see the update. The script prints the share of the layers' weights that are affected.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

FRACTION_BITS = {"bfloat16": 7, "float16": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory that smollm2.py made")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--steps", type=int, nargs="+", default=[12, 40])
    args = parser.parse_args()
    exponents = torch.cat([weight_exponents(file) for file in args.model.glob("*.safetensors")])
    print(f"{len(exponents):,} weights, learning rate {args.learning_rate:g}")
    for dtype, bits in FRACTION_BITS.items():
        half_step = 2.0 ** (exponents - bits - 1)
        for steps in args.steps:
            unseen = (half_step > args.learning_rate * steps).float().mean().item()
            print(f"{dtype:<9} after {steps:>3} steps: {unseen:.1%} cannot have changed")


def weight_exponents(file: Path) -> torch.Tensor:
    """Binary exponents of the values of all matrices except the embeddings."""
    matrices = [w for name, w in load_file(file).items() if w.ndim >= 2 and "embed" not in name]
    values = torch.cat([w.float().abs().flatten() for w in matrices])
    return torch.floor(torch.log2(values.clamp_min(1e-30)))


if __name__ == "__main__":
    main()
