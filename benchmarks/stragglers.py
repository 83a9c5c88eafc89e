"""Policies against stragglers: two agents in a row whose lengths have a long tail, on the CPU.

    python benchmarks/stragglers.py --json stragglers.json
    python benchmarks/stragglers.py --quick

Each episode has a planner's turn and a solver's turn. The length of a turn is drawn per episode
from a log-normal distribution around a length of the task. Its 90th percentile is five times its
median. So some tasks are long, and so are some episodes of every task. The reward grows with the
length of the episode, so a policy that favours short episodes lowers it.

Policies, on the same model, tasks, batches and seeds:

- plain: the run waits for all G episodes of a group, and a batch for groups that would be too stale
  for the next one.
- cancel: groups that are too stale are cancelled and tried again (enforce = "cancel").
- deadline: environment.turn_timeout_s; a turn that takes longer ends its episode, which is cut.
- fastest: G + r episodes start, and the first G that finish are trained (rollout.selection).
- full: G + r episodes run to the end, and G are selected at random (rollout.oversample).
- longest first: rollout.longest_first; tasks with long episodes start first.

Columns: trained episodes per second after the first steps; the share of sampled tokens that was not
trained (tokens/wasted: whole turns only); mean reward and mean tokens of the trained episodes,
which equal those of "plain" if there is no bias; episodes that were cut; shares of the trained
groups, by quarters of the tasks from the shortest to the longest: without a bias, each has 25 %;
and the tokens that were not trained, by reason (docs/explanation/buffer.md), the most first.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from millrace.bench.workloads import make_long_tailed_model
from millrace.cluster.process import available_cores
from millrace.core.records import Group
from millrace.monitoring.files.metrics import read_metrics, table

# Standard deviation of the logarithm for which p90 is five times the median. The task contributes
# 0.8 of it and the episode 0.6; their squares add up to 1.
TAIL = math.log(5) / 1.2816
MEDIAN_TOKENS, MAX_TOKENS = 8, 100  # of a turn
WARM_UP_STEPS = 1  # left out
GROUP_SIZE, EXTRA = 6, 2

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cancel": {"buffer": {"staleness": {"type": "oldest", "enforce": "cancel"}}},
    "deadline": {"environment": {"turn_timeout_s": 1.0}},
    "fastest": {"rollout": {"oversample": EXTRA, "selection": "fastest"}},
    "full": {"rollout": {"oversample": EXTRA, "selection": "first"}},
    "longest first": {"rollout": {"longest_first": 64}},
}


async def chain(task: mr.Task, agent: mr.Agent) -> float:
    """A planner's turn, then a solver's; each has a random length."""
    num_tokens = 0
    text = str(task.prompt)
    for role in ("planner", "solver"):
        wanted = task.columns["length"] * agent.rng.lognormal(0.0, 0.6 * TAIL)
        speaker = agent.role(role)
        count = max(1, min(MAX_TOKENS, round(wanted)))
        while count > 0:  # an end token ends a reply, not the turn
            reply = await speaker.complete(text, max_new_tokens=count)
            sampled = len(reply.exchange.completion.tokens)
            count -= sampled
            num_tokens += sampled
            text += reply.text + "a"
    return num_tokens / (2 * MAX_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--quick", action="store_true", help="two steps of each, to try it out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    steps = 2 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_long_tailed_model(model, seed=0)
        rows = []
        print(
            f"{'policy':14} {'episodes/s':>10} {'wasted':>7} {'reward':>7} {'tokens':>7} {'cut':>4}"
            f" {'by length':>19}  wasted tokens"
        )
        for name in args.policies:
            run_dir = Path(folder) / name.replace(" ", "_")
            rows.append(measure(name, model=model, run_dir=run_dir, steps=steps))
            print(line(rows[-1]), flush=True)
    if args.json is not None:
        result = {"steps": steps, "cores": available_cores(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


class Lengths(mr.Callback):
    """The lengths of the tasks of trained groups."""

    def __init__(self) -> None:
        self.trained: list[float] = []

    def on_group(self, group: Group) -> None:
        self.trained.append(group.task.columns["length"])


def measure(name: str, *, model: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    settings = POLICIES[name]
    rng = np.random.default_rng(0)
    tasks = [
        {
            "prompt": f"{number:03d}",
            "length": MEDIAN_TOKENS * float(rng.lognormal(0.0, 0.8 * TAIL)),
        }
        for number in range(32)
    ]
    lengths = Lengths()
    mr.train(
        callbacks=[lengths],
        model=str(model),
        run_dir=str(run_dir),
        tasks=tasks,
        environment={"function": chain, "max_turns": 512, **settings.get("environment", {})},
        rollout={"group_size": GROUP_SIZE, **settings.get("rollout", {})},
        engine={"max_sequences": 16},
        buffer=settings.get("buffer", {}),
        cluster={"threads": 1},
        trainer={"steps": steps, "groups_per_step": 4},
        optimizer={"learning_rate": 1e-7},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    row = summary(name, read_metrics(run_dir / "metrics.jsonl"))
    bounds = np.quantile([task["length"] for task in tasks], [0.25, 0.5, 0.75])
    quarters = np.bincount(np.searchsorted(bounds, lengths.trained), minlength=4)
    return {**row, "share_by_length": (quarters / quarters.sum()).tolist()}


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    begin, end = rows[min(WARM_UP_STEPS, len(rows)) - 1], rows[-1]
    counted = rows[WARM_UP_STEPS:] or rows
    seconds = end["time_s"] - begin["time_s"] or end["time_s"]
    num_episodes = len(counted) * 4 * GROUP_SIZE
    wasted = sum(table(end, "tokens/wasted").values())
    trained = sum(row["batch/trained_tokens"] for row in rows)
    tokens = sum(row["batch/trained_tokens"] for row in counted)
    return {
        "policy": name,
        "episodes_per_s": num_episodes / seconds,
        "wasted_share": wasted / (wasted + trained),
        "reward": float(np.mean([row["reward/mean"] for row in counted])),
        "tokens": tokens / num_episodes,
        "cut": sum(sum(table(row, "episode/cut").values()) for row in counted),
        "tokens_wasted": table(end, "tokens/wasted"),
    }


def line(row: dict[str, Any]) -> str:
    reasons = sorted(row["tokens_wasted"].items(), key=lambda item: -item[1])
    return (
        f"{row['policy']:14} {row['episodes_per_s']:10.1f} {row['wasted_share']:7.1%}"
        f" {row['reward']:7.3f} {row['tokens']:7.1f} {row['cut']:4d}"
        f" {' '.join(f'{share:4.0%}' for share in row['share_by_length'])}"
        f"  {', '.join(f'{reason} {count}' for reason, count in reasons) or 'none'}"
    )


if __name__ == "__main__":
    main()
