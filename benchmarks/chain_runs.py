"""Training runs on the task of chains.py: arguments, settings and accuracy curves."""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from chains import make_tasks, outcome_reward
from resumable_sweep import sweep

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

OUTCOME_SCORER = {"function": f"{outcome_reward.__module__}:{outcome_reward.__name__}"}

Row = dict[str, Any]
Measure = Callable[..., Row]  # (folder, name, *, seed, sizes)


def sweep_runs(
    measure: Measure,
    *,
    names: Sequence[str],
    option: str,
    key: str,
    seeds: int,
    sizes: dict[str, int],
    quick_sizes: dict[str, int],
    description: str,
) -> list[Row]:
    """Measure every seed and name that the command line asks for. Rows have the name as `key`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="read and extended, row by row")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument(f"--{option}", nargs="+", choices=names, default=list(names))
    parser.add_argument("--quick", action="store_true", help="two steps of each, to try it out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return sweep(
            itertools.product(range(args.seeds), getattr(args, option)),
            lambda seed, name: measure(
                Path(folder), name, seed=seed, sizes=quick_sizes if args.quick else sizes
            ),
            key=("seed", key),
            file=args.json,
        )


def train_on_chains(
    policy: Path,
    run_dir: Path,
    *,
    seed: int,
    num_steps: int,
    sizes: dict[str, int],
    group_size: int = 8,
    groups_per_step: int = 8,
    learning_rate: float,
    evaluate: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[list[Row], dict[int, float | None]]:
    """Train one run. Returns its metrics, and the held-out accuracy by training step.

    `num_steps` is the length of a chain. `settings` are added to those that all runs share.
    """
    result = mr.train(
        {
            "model": str(policy),
            "run_dir": str(run_dir),
            "seed": seed,
            "sampling": {"max_new_tokens": 6 * num_steps + 1},
            "rollout": {"group_size": group_size},
            "trainer": {"steps": sizes["steps"], "groups_per_step": groups_per_step},
            "optimizer": {"learning_rate": learning_rate},
            "engine": {"max_sequences": 128},
            "cluster": {"threads": 1},
            "evaluate": evaluate,
            "checkpoint": {"every_steps": 0},
            "monitoring": {"progress": "off"},
            **settings,
        },
        tasks=make_tasks(4096, seed=seed, num_steps=num_steps),
        eval_tasks=make_tasks(sizes["held_out"], seed=0, num_steps=num_steps, held_out=True),
    )
    metrics = read_metrics(run_dir / "metrics.jsonl")
    accuracy = {0: result.accuracy_before, sizes["steps"]: result.accuracy_after}
    for row in metrics:
        if row.get("eval/accuracy") is not None:
            accuracy[row.get("eval/step", row["step"])] = row["eval/accuracy"]
    return metrics, dict(sorted(accuracy.items()))
