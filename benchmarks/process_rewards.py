"""Samples that a policy needs to learn a task of several steps: rewards for each step against a
reward for the outcome alone.

    python benchmarks/process_rewards.py --json process_rewards.json

The task, the policy and the judge of steps are in chains.py. Both runs start from the same policy
and differ in their [[scorers]] tables and the advantages that go with them; accuracy is that of the
likeliest answer on held-out numbers. Rows in the JSON file are not measured again.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from chains import GOOD, STEP, make_judge, make_policy, make_tasks, outcome
from sweeping import sweep

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics

NUM_STEPS = 5  # of a chain
TARGET = 0.9
EPISODES_PER_STEP = 64
ENOUGH = 0.95  # of the steps of held-out numbers that the judge must be right about
SIZES = {"steps": 80, "examples": 9600, "judged": 96_000, "held_out": 128}
QUICK = {"steps": 2, "examples": 128, "judged": 128, "held_out": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="read and extended, row by row")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--quick", action="store_true", help="two steps of each, to try it out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if args.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(
            itertools.product(range(args.seeds), args.rewards),
            lambda seed, rewards: measure(Path(folder), rewards, seed=seed, sizes=sizes),
            key=("seed", "rewards"),
            file=args.json,
        )
    print(table(rows))


def measure(folder: Path, rewards: str, *, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """One run; the policy and the judge of a seed are made once and kept in `folder`."""
    policy, judge = folder / f"policy-{seed}", folder / f"judge-{seed}"
    if not policy.exists():
        make_policy(policy, seed=seed, num_steps=NUM_STEPS, num_examples=sizes["examples"])
        rightly = make_judge(
            judge, seed=seed, num_steps=NUM_STEPS, num_examples=sizes["judged"], enough=ENOUGH
        )
        print(f"seed {seed}: the judge is right about {rightly:.3f} of the steps", flush=True)
    run_dir = folder / f"{rewards}-{seed}"
    result = mr.train(
        {**settings(policy, run_dir, seed=seed, sizes=sizes), **REWARDS[rewards](judge)},
        tasks=make_tasks(4096, seed=seed, num_steps=NUM_STEPS),
        eval_tasks=make_tasks(sizes["held_out"], seed=0, num_steps=NUM_STEPS, held_out=True),
    )
    curve = {0: result.accuracy_before, sizes["steps"]: result.accuracy_after}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        if row.get("eval/accuracy") is not None:
            curve[row.get("eval/step", row["step"])] = row["eval/accuracy"]
    curve = dict(sorted(curve.items()))
    reached = [step for step, accuracy in curve.items() if (accuracy or 0) >= TARGET]
    return {
        "rewards": rewards,
        "seed": seed,
        "samples": reached[0] * EPISODES_PER_STEP if reached else None,
        "curve": curve,
    }


def settings(policy: Path, run_dir: Path, *, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "model": str(policy),
        "run_dir": str(run_dir),
        "seed": seed,
        "sampling": {"max_new_tokens": 6 * NUM_STEPS + 1},
        "rollout": {"group_size": 8},
        "trainer": {
            "steps": sizes["steps"],
            "groups_per_step": EPISODES_PER_STEP // 8,
            "threads": 1,
        },
        "optimizer": {"learning_rate": 2e-4},
        "engine": {"threads": 1, "max_sequences": 128},
        "evaluate": {"every_steps": 5},
        "checkpoint": {"every_steps": 0},
        "monitoring": {"progress": "off"},
    }


def _outcome_alone(judge: Path) -> dict[str, Any]:
    return {
        "scorers": [{"function": f"{outcome.__module__}:{outcome.__name__}"}],
        "scoring": {"workers": 1, "advantages": {"type": "group"}},
    }


def _process(judge: Path) -> dict[str, Any]:
    steps = {
        "type": "process_reward_model",
        "model": str(judge),
        "label": GOOD,
        "steps": {"by": "delimiter", "delimiter": STEP},
    }
    return {
        "scorers": [{"function": f"{outcome.__module__}:{outcome.__name__}"}, steps],
        "placement": {"scorers": {steps["type"]: "cpu"}},
        "scoring": {"workers": 1, "advantages": {"type": "returns", "discount": 0.95}},
    }


REWARDS = {"outcome": _outcome_alone, "process": _process}


def table(rows: list[dict[str, Any]]) -> str:
    """Samples to the target; of a run that did not get there, that it took more than all it had."""
    lines = [f"| seed | {' | '.join(REWARDS)} | ratio |", "|---" * (len(REWARDS) + 2) + "|"]
    for seed in sorted({row["seed"] for row in rows}):
        found = {row["rewards"]: row for row in rows if row["seed"] == seed}
        cells = [_cell(found[name]) if name in found else "" for name in REWARDS]
        ratio = ""
        if len(found) == len(REWARDS) and found["process"]["samples"]:
            times = (found["outcome"]["samples"] or _spent(found["outcome"])) / (
                found["process"]["samples"]
            )
            ratio = f"{'' if found['outcome']['samples'] else 'over '}{times:.1f}"
        lines.append(f"| {seed} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return str(row["samples"] or f"over {_spent(row)}")


def _spent(row: dict[str, Any]) -> int:
    return max(int(step) for step in row["curve"]) * EPISODES_PER_STEP


if __name__ == "__main__":
    main()
