"""Samples that a policy needs to learn a task of several steps: a reward for each step, against a
reward for the outcome alone.

    python benchmarks/process_rewards.py --json process_rewards.json

The task, the policy and the process reward model are in chains.py. Both runs start from the same
policy. They differ in their scorers and in the advantages that suit them. Accuracy is greedy, on
held-out numbers. Rows in the JSON file are not measured again.
"""

from pathlib import Path
from typing import Any

from chain_runs import OUTCOME_SCORER, Row, sweep_runs, train_on_chains
from chains import CORRECT_LABEL, STEP, make_policy, make_process_reward_model

NUM_STEPS = 5  # of a chain
TARGET = 0.9
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
EPISODES_PER_STEP = GROUPS_PER_STEP * GROUP_SIZE
TARGET_STEP_ACCURACY = 0.95  # of the process reward model
SIZES = {"steps": 80, "examples": 9600, "judged": 96_000, "held_out": 128}
QUICK = {"steps": 2, "examples": 128, "judged": 128, "held_out": 8}


def main() -> None:
    rows = sweep_runs(
        measure,
        names=list(REWARDS),
        option="rewards",
        key="rewards",
        seeds=2,
        sizes=SIZES,
        quick_sizes=QUICK,
        description=" ".join((__doc__ or "").splitlines()[:2]),
    )
    print(table(rows))


def measure(folder: Path, rewards: str, *, seed: int, sizes: dict[str, int]) -> Row:
    """Measure one run. The models of a seed are made once and kept in `folder`."""
    policy, reward_model = folder / f"policy-{seed}", folder / f"process-reward-model-{seed}"
    if not policy.exists():
        make_policy(policy, seed=seed, num_steps=NUM_STEPS, num_examples=sizes["examples"])
        accuracy = make_process_reward_model(
            reward_model,
            seed=seed,
            num_steps=NUM_STEPS,
            num_examples=sizes["judged"],
            target_accuracy=TARGET_STEP_ACCURACY,
        )
        print(f"seed {seed}: the process reward model has accuracy {accuracy:.3f}", flush=True)
    _, curve = train_on_chains(
        policy,
        folder / f"{rewards}-{seed}",
        seed=seed,
        num_steps=NUM_STEPS,
        sizes=sizes,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        learning_rate=2e-4,
        evaluate={"every_steps": 5},
        settings=REWARDS[rewards](reward_model),
    )
    reached = [step for step, accuracy in curve.items() if (accuracy or 0) >= TARGET]
    return {
        "rewards": rewards,
        "seed": seed,
        "samples": reached[0] * EPISODES_PER_STEP if reached else None,
        "curve": curve,
    }


def _outcome_rewards(reward_model: Path) -> dict[str, Any]:
    return {
        "scorers": [OUTCOME_SCORER],
        "scoring": {"workers": 1, "advantages": {"type": "group"}},
    }


def _process_rewards(reward_model: Path) -> dict[str, Any]:
    step_scorer = {
        "type": "process_reward_model",
        "model": str(reward_model),
        "label": CORRECT_LABEL,
        "steps": {"by": "delimiter", "delimiter": STEP},
    }
    return {
        "scorers": [OUTCOME_SCORER, step_scorer],
        "placement": {"models": {step_scorer["type"]: "cpu"}},
        "scoring": {"workers": 1, "advantages": {"type": "returns", "discount": 0.95}},
    }


REWARDS = {"outcome": _outcome_rewards, "process": _process_rewards}


def table(rows: list[Row]) -> str:
    """Samples until the target, or "over N" for a run of N samples that did not reach it."""
    lines = [f"| seed | {' | '.join(REWARDS)} | ratio |", "|---" * (len(REWARDS) + 2) + "|"]
    for seed in sorted({row["seed"] for row in rows}):
        found = {row["rewards"]: row for row in rows if row["seed"] == seed}
        cells = [_cell(found[name]) if name in found else "" for name in REWARDS]
        ratio = ""
        if len(found) == len(REWARDS) and found["process"]["samples"]:
            times = (found["outcome"]["samples"] or _num_samples(found["outcome"])) / (
                found["process"]["samples"]
            )
            ratio = f"{'' if found['outcome']['samples'] else 'over '}{times:.1f}"
        lines.append(f"| {seed} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return str(row["samples"] or f"over {_num_samples(row)}")


def _num_samples(row: Row) -> int:
    return max(int(step) for step in row["curve"]) * EPISODES_PER_STEP


if __name__ == "__main__":
    main()
