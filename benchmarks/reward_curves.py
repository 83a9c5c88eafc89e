"""Rewards of runs that `grpo_on_gpu.py --save FILE` saved, over their steps, in one picture.

    python benchmarks/reward_curves.py curves.png bfloat16=bf16.json float16=fp16.json

Each point is the mean of ten steps; the table has the same numbers.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

STEPS = 10  # per point


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE")
    args = parser.parse_args()
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, _, file in (run.partition("=") for run in args.runs):
        rewards = np.array(json.loads(Path(file).read_text())["rewards"])
        points = rewards[: len(rewards) // STEPS * STEPS].reshape(-1, STEPS).mean(axis=1)
        axes.plot(STEPS * (np.arange(len(points)) + 0.5), points, marker="o", label=name)
        print(f"| {name} | {' | '.join(f'{point:.2f}' for point in points)} |")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, None))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
