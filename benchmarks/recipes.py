"""Learning per sampled token: plain groups, pivots and trees.

    python benchmarks/recipes.py --seeds 3 --json recipes.json

The task is that of chains.py with fewer steps, and only the correct result is rewarded. All runs
start from the same policy and are strictly on-policy. Each step samples about the same number of
tokens: episodes that share a prefix sample it once, so a step has more of them. Accuracy is sampled
at temperature 1, on held-out numbers. Rows in the JSON file are not measured again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chain_runs import OUTCOME_SCORER, Row, sweep_runs, train_on_chains
from chains import careless_add, make_policy

NUM_STEPS = 3  # of a chain
CAREFUL = 0.6  # probability that a step of a warm-start example is correct
GROUP_SIZE = 8
TARGET = 0.75
SIZES = {"steps": 30, "examples": 9600, "held_out": 256, "every": 3}
QUICK = {"steps": 2, "examples": 128, "held_out": 8, "every": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRun:
    groups_per_step: int
    recipe: dict[str, Any] | None = None


RUNS = {
    "groups": RecipeRun(groups_per_step=8),
    "pivot by surprisal": RecipeRun(
        groups_per_step=12, recipe={"type": "pivot", "by": "surprisal"}
    ),
    "pivot by entropy": RecipeRun(groups_per_step=12, recipe={"type": "pivot", "by": "entropy"}),
    "tree": RecipeRun(groups_per_step=12, recipe={"type": "tree", "branches": 2, "depth": 2}),
}


def main() -> None:
    rows = sweep_runs(
        measure,
        names=list(RUNS),
        option="runs",
        key="run",
        seeds=1,
        sizes=SIZES,
        quick_sizes=QUICK,
        description=(__doc__ or "").splitlines()[0],
    )
    print(json.dumps(summary(rows)))


def measure(folder: Path, name: str, *, seed: int, sizes: dict[str, int]) -> Row:
    """Measure one run. The policy of a seed is made once and kept in `folder`."""
    policy = folder / f"policy-{seed}"
    if not policy.exists():
        make_policy(
            policy,
            seed=seed,
            num_steps=NUM_STEPS,
            num_examples=sizes["examples"],
            add=careless_add(CAREFUL),
        )
    run = RUNS[name]
    metrics, accuracy = train_on_chains(
        policy,
        folder / f"{name}-{seed}",
        seed=seed,
        num_steps=NUM_STEPS,
        sizes=sizes,
        group_size=GROUP_SIZE,
        groups_per_step=run.groups_per_step,
        learning_rate=3e-4,
        evaluate={"every_steps": sizes["every"], "temperature": 1.0},
        settings={
            "environment": {} if run.recipe is None else {"recipe": run.recipe},
            "scorers": [OUTCOME_SCORER],
            "scoring": {"workers": 1},
            "buffer": {"max_staleness": 0},
        },
    )
    tokens = np.cumsum([0, *(row["batch/trained_tokens"] for row in metrics)]).astype(int).tolist()
    return {
        "run": name,
        "seed": seed,
        "tokens_per_step": round(tokens[-1] / sizes["steps"]),
        "curve": [[tokens[step], accuracy[step]] for step in accuracy],
    }


def summary(rows: list[Row]) -> dict[str, Row]:
    """Compare the runs at the largest number of tokens that all of them have sampled.

    Per run a list over seeds of the accuracy there, the mean accuracy until there, and the tokens
    until the target accuracy (None = not reached)."""
    budget = min(row["curve"][-1][0] for row in rows)
    at = np.linspace(0, budget, 101)
    found: dict[str, Row] = {}
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
