"""What to do about stragglers: a chain of two agents whose lengths have a long tail, on this CPU.

    python benchmarks/stragglers.py --json stragglers.json
    python benchmarks/stragglers.py --quick

Each episode is a planner's turn and a solver's turn. How long a turn becomes is drawn for each
episode from a log-normal distribution whose 90th percentile is five times its median, around a
length that belongs to the task: so some tasks are long, and so are some episodes of any task. The
reward grows with the length of the episode: what favours short ones shows in it.

Policies, on the same model, tasks, batches and seeds:

- plain: the run waits for all G episodes of a group.
- deadline: environment.turn_timeout_s; a turn that takes longer ends its episode, which is marked.
- redundancy: G + r episodes start, and the first G that finish are trained.
- full: G + r episodes run to the end, and G are selected at random (rollout.oversample).
- longest first: rollout.longest_first; tasks with long episodes start first.

Columns: trained episodes per second, between the first steps and the last; the share of the
sampled tokens that was not trained (tokens/wasted: whole turns only); mean reward and mean tokens
of the trained episodes, which equal those of "plain" if there is no bias; episodes that were cut.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from millrace.bench.stopwatch import make_long_tailed_model
from millrace.core.machine import available_cores
from millrace.monitoring.files.metrics import read_metrics, table

# Deviation of the logarithm, with which p90 is five times the median: 0.8 of it is the task's and
# 0.6 the episode's, which together are 1.
TAIL = math.log(5) / 1.2816
MEDIAN, MOST = 8, 100  # tokens of a turn
WARM_UP_STEPS = 1  # left out
GROUP_SIZE, EXTRA = 6, 2

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "deadline": {"environment": {"turn_timeout_s": 1.0}},
    "redundancy": {"rollout": {"redundancy": EXTRA}},
    "full": {"rollout": {"oversample": EXTRA, "selection": "first"}},
    "longest first": {"rollout": {"longest_first": 64}},
}


async def chain(task: mr.Task, agent: mr.Agent) -> float:
    """A planner, then a solver; each writes as much as its dice say."""
    num_tokens = 0
    text = task.prompt
    for role in ("planner", "solver"):
        wanted = task.columns["length"] * agent.rng.lognormal(0.0, 0.6 * TAIL)
        speaker = agent.role(role)
        count = max(1, min(MOST, round(wanted)))
        while count > 0:  # an end token ends a reply, but not the turn
            reply = await speaker.complete(text, max_new_tokens=count)
            sampled = len(reply.exchange.completion.tokens)
            count -= sampled
            num_tokens += sampled
            text += reply.text + "a"
    return num_tokens / (2 * MOST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--quick", action="store_true", help="2 steps: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    steps = 2 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_long_tailed_model(model, seed=0)
        rows = []
        print(
            f"{'policy':14} {'episodes/s':>10} {'wasted':>7} {'reward':>7} {'tokens':>7} {'cut':>4}"
        )
        for name in args.policies:
            run_dir = Path(folder) / name.replace(" ", "_")
            rows.append(measure(name, model=model, run_dir=run_dir, steps=steps))
            print(line(rows[-1]), flush=True)
    if args.json is not None:
        result = {"steps": steps, "cores": available_cores(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(name: str, *, model: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    settings = POLICIES[name]
    rng = np.random.default_rng(0)
    tasks = [
        {"prompt": f"{number:03d}", "length": MEDIAN * float(rng.lognormal(0.0, 0.8 * TAIL))}
        for number in range(32)
    ]
    mr.train(
        model=str(model),
        run_dir=str(run_dir),
        tasks=tasks,
        environment={"function": chain, "max_turns": 512, **settings.get("environment", {})},
        rollout={"group_size": GROUP_SIZE, **settings.get("rollout", {})},
        engine={"max_sequences": 16, "threads": 1},
        trainer={"steps": steps, "groups_per_step": 4, "threads": 1},
        optimizer={"learning_rate": 1e-7},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    return summary(name, read_metrics(run_dir / "metrics.jsonl"))


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
    return (
        f"{row['policy']:14} {row['episodes_per_s']:10.1f} {row['wasted_share']:7.1%}"
        f" {row['reward']:7.3f} {row['tokens']:7.1f} {row['cut']:4d}"
    )


if __name__ == "__main__":
    main()
