"""Cost of staleness: final accuracy on the demo's task, by staleness and by loss.

    python benchmarks/staleness.py --json staleness.json --plot staleness.png

After the first batches, each batch has exactly the staleness of its row (lockstep.py), and a run
has at least four times as many steps. "naive" is PPO that treats its data as on-policy: its ratio
compares with the trainer's logprobs before the step and ignores the engine's. "default" is
`clipped`, which compares with the engine's logprobs.

Rows in the JSON file are not measured again, so the script may be stopped at any time.
"""

import argparse
import functools
import itertools
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from lockstep import QUICK, LockstepSettings, train, warm_start_model
from matplotlib.figure import Figure
from resumable_sweep import sweep

LOSSES: dict[str, dict[str, Any]] = {
    "naive": {"type": "ppo", "anchor": "proximal"},
    "default": {"type": "clipped"},
    "decoupled": {"type": "decoupled_ppo"},
    "m2po": {"type": "m2po"},
    "vcpo": {"type": "vcpo"},
    "vcpo + baseline": {"type": "vcpo", "minimum_variance_baseline": True},
    "vespo": {"type": "vespo"},
    "default + ess": {"type": "clipped", "ess_scaling": True},
    "default + entropy": {"type": "clipped", "entropy_exponent": 1.0},
}
LIMITS = (0, 8, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="read and extended, row by row")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=256, help="of a run, at least")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to try it out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            warm_start_model(Path(folder), seed=seed, quick=args.quick)
        # The longest runs first, so that all processes end together.
        limits = sorted(args.limits, reverse=True)
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            rows = sweep(
                itertools.product(range(args.seeds), limits, args.losses),
                functools.partial(measure, Path(folder), steps=args.steps, quick=args.quick),
                key=("seed", "max_staleness", "loss"),
                file=args.json,
                pool=pool,
            )
    print(table(rows))
    if args.plot:
        plot(rows, args.plot)


def measure(
    models: Path, seed: int, limit: int, loss: str, *, steps: int, quick: bool
) -> dict[str, Any]:
    sizes = QUICK if quick else {"steps": max(steps, 4 * limit)}
    settings = LockstepSettings(loss=LOSSES[loss], staleness=limit, seed=seed, **sizes)
    result = train(warm_start_model(models, seed=seed, quick=quick), settings)
    # The first batches all come from version 0 and are not yet stale enough.
    first = min(limit, settings.steps - 1)
    return {
        "loss": loss,
        "max_staleness": limit,
        "seed": seed,
        "accuracy": result.accuracy,
        "staleness_mean": round(result.mean("staleness", first=first), 3),
        "kl": round(result.mean("mismatch/kl_k3", first=first), 5),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Mean accuracy and, in parentheses, the lowest and highest accuracy of the seeds."""
    limits = sorted({row["max_staleness"] for row in rows})
    losses = [loss for loss in LOSSES if any(row["loss"] == loss for row in rows)]
    lines = [
        "| staleness | " + " | ".join(losses) + " |",
        "|---" * (len(losses) + 1) + "|",
    ]
    for limit in limits:
        cells = [_cell(_accuracies(rows, loss, limit)) for loss in losses]
        lines.append(f"| {limit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def _accuracies(rows: list[dict[str, Any]], loss: str, limit: int) -> list[float]:
    return [r["accuracy"] for r in rows if (r["loss"], r["max_staleness"]) == (loss, limit)]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """For each loss a line through the means, and a band from the lowest to the highest seed."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    limits = sorted({row["max_staleness"] for row in rows})
    for loss in LOSSES:
        known = [limit for limit in limits if _accuracies(rows, loss, limit)]
        if not known:
            continue
        values = [_accuracies(rows, loss, limit) for limit in known]
        places = [limits.index(limit) for limit in known]
        means = [float(np.mean(seeds)) for seeds in values]
        (line,) = axes.plot(places, means, marker="o", label=loss)
        axes.fill_between(
            places,
            [min(seeds) for seeds in values],
            [max(seeds) for seeds in values],
            color=line.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xticks(range(len(limits)), [str(limit) for limit in limits])
    axes.set(xlabel="staleness, versions", ylabel="held-out accuracy after training")
    axes.set_ylim(top=1.01)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
