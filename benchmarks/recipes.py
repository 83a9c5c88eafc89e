"""Learning per sampled token: plain groups, pivots and trees.

    python benchmarks/recipes.py --seeds 3 --json recipes.json

The task is that of chains.py with fewer steps, rewarded for the right result alone. All runs start
from the same policy and are strictly on-policy. A step samples about equally many tokens in each:
episodes that share a prefix sample it once, so there are more of them. Accuracy is that of the
likeliest answer on held-out numbers. Rows in the JSON file are not measured again.
"""

import argparse
import itertools
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chains import BASE, make_policy, make_tasks, outcome
from sweeping import sweep

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

NUM_STEPS = 3  # of a chain
CARE = 0.6  # of the teacher, at each step: the policy begins with the right habit, and a wrong one
GROUP_SIZE = 8
TARGET = 0.75
SIZES = {"steps": 30, "examples": 9600, "held_out": 256, "every": 3}
QUICK = {"steps": 2, "examples": 128, "held_out": 8, "every": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    groups_per_step: int
    recipe: dict[str, Any] | None = None


RUNS = {
    "groups": Run(groups_per_step=8),
    "pivot by surprisal": Run(groups_per_step=12, recipe={"type": "pivot", "by": "surprisal"}),
    "pivot by entropy": Run(groups_per_step=12, recipe={"type": "pivot", "by": "entropy"}),
    "tree": Run(groups_per_step=12, recipe={"type": "tree", "branches": 2, "depth": 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="read and extended, row by row")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--quick", action="store_true", help="two steps of each, to try it out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if args.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(
            itertools.product(range(args.seeds), args.runs),
            lambda seed, run: measure(Path(folder), run, seed=seed, sizes=sizes),
            key=("seed", "run"),
            file=args.json,
        )
    print(json.dumps(summary(rows)))


def mostly_right(total: int, digit: int, rng: random.Random) -> int:
    return (total + digit) % BASE if rng.random() < CARE else digit


def measure(folder: Path, name: str, *, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """One run; the policy of a seed is made once and kept in `folder`."""
    policy = folder / f"policy-{seed}"
    if not policy.exists():
        make_policy(
            policy,
            seed=seed,
            num_steps=NUM_STEPS,
            num_examples=sizes["examples"],
            result=mostly_right,
        )
    run_dir = folder / f"{name}-{seed}"
    result = mr.train(
        settings(policy, run_dir, run=RUNS[name], seed=seed, sizes=sizes),
        tasks=make_tasks(4096, seed=seed, num_steps=NUM_STEPS),
        eval_tasks=make_tasks(sizes["held_out"], seed=0, num_steps=NUM_STEPS, held_out=True),
    )
    metrics = list(read_metrics(run_dir / "metrics.jsonl"))
    tokens = np.cumsum([0, *(row["batch/trained_tokens"] for row in metrics)]).astype(int).tolist()
    accuracy = {0: result.accuracy_before, sizes["steps"]: result.accuracy_after}
    for row in metrics:
        if row.get("eval/accuracy") is not None:
            accuracy[row.get("eval/step", row["step"])] = row["eval/accuracy"]
    return {
        "run": name,
        "seed": seed,
        "tokens_per_step": round(tokens[-1] / sizes["steps"]),
        "curve": [[tokens[step], accuracy[step]] for step in sorted(accuracy)],
    }


def settings(
    policy: Path, run_dir: Path, *, run: Run, seed: int, sizes: dict[str, int]
) -> dict[str, Any]:
    return {
        "model": str(policy),
        "run_dir": str(run_dir),
        "seed": seed,
        "sampling": {"max_new_tokens": 6 * NUM_STEPS + 1},
        "rollout": {"group_size": GROUP_SIZE},
        "environment": {} if run.recipe is None else {"recipe": run.recipe},
        "scorers": [{"function": f"{outcome.__module__}:{outcome.__name__}"}],
        "scoring": {"workers": 1},
        "buffer": {"max_staleness": 0},
        "trainer": {"steps": sizes["steps"], "groups_per_step": run.groups_per_step, "threads": 1},
        "optimizer": {"learning_rate": 3e-4},
        "engine": {"threads": 1, "max_sequences": 128},
        "evaluate": {"every_steps": sizes["every"], "temperature": 1.0},
        "checkpoint": {"every_steps": 0},
        "monitoring": {"progress": "off"},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each run, over its seeds: accuracy when all had sampled as many tokens, the mean accuracy
    on the way there, and the tokens it took to the target (None = not reached)."""
    budget = min(row["curve"][-1][0] for row in rows)
    at = np.linspace(0, budget, 101)
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [np.array(row["curve"]).T for row in rows if row["run"] == name]
        curves = [np.interp(at, *curve) for curve in own]
        found[name] = {
            "tokens": budget,
            "accuracy": [round(float(curve[-1]), 3) for curve in curves],
            "mean_accuracy": [round(float(curve.mean()), 3) for curve in curves],
            "tokens_to_target": [_reached(tokens, accuracy) for tokens, accuracy in own],
        }
    return found


def _reached(tokens: np.ndarray, accuracy: np.ndarray) -> int | None:
    reached = np.flatnonzero(accuracy >= TARGET)
    return int(tokens[reached[0]]) if len(reached) else None


if __name__ == "__main__":
    main()
