"""Does a slow scorer slow down the trainer? Two real runs at the same time, on the CPU.

    python benchmarks/scoring.py --json scoring.json

Both runs have the same model, tasks, batches and settings. The calls of one scorer return at once;
those of the other take a second each, with at most 64 in flight. The runs share the machine, so
other load affects both. A run that waits leaves its cores to the other run, so the ratio is
pessimistic for the slow scorer. The measurement starts when both runs are warm and ends with the
first run.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.bench.workloads import distinct_share, make_long_tailed_model
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.run.train import train

CALL_S = 1.0
CONCURRENCY = 64
GROUPS, GROUP_SIZE = 8, 8  # per step


async def free(completions: list[str], **columns: Any) -> list[float]:
    return distinct_share(completions, **columns)


async def slow(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(CALL_S)
    return distinct_share(completions, **columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (100)")
    parser.add_argument("--warm-up-steps", type=int, default=15, help="left out (15)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest completion (128)")
    parser.add_argument("--staleness", type=int, default=4, help="limit (4)")
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--keep", metavar="DIR", help="keep the run directories here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-scoring-") as scratch:
        folder = Path(args.keep or scratch)
        make_long_tailed_model(folder / "model", seed=0)
        context = multiprocessing.get_context("spawn")
        runs = [context.Process(target=run, args=(name, folder, args)) for name in ("free", "slow")]
        for process in runs:
            process.start()
        for process in runs:
            process.join()
        if any(process.exitcode for process in runs):
            return 1
        result = compare(folder, warm_up_steps=args.warm_up_steps)
    for name, value in result.items():
        print(f"{name:<24}{value:,.4g}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def run(name: str, folder: Path, args: argparse.Namespace) -> None:
    scorer = {"function": f"{Path(__file__).resolve()}:{name}", "concurrency": CONCURRENCY}
    started_s = time.time()
    train(
        model=str(folder / "model"),
        run_dir=str(folder / name),
        tasks=[{"prompt": f"task{number:04}"} for number in range(1024)],
        scorers=[scorer],
        sampling={"max_new_tokens": args.max_new_tokens},
        rollout={"group_size": GROUP_SIZE, "max_running_groups": 128},
        buffer={"max_staleness": args.staleness},
        trainer={"steps": args.steps, "groups_per_step": GROUPS},
        optimizer={"learning_rate": 1e-7},  # keeps the lengths constant
        engine={"max_sequences": GROUPS * GROUP_SIZE},
        cluster={"threads": 1},
        scoring={"workers": 1},
        checkpoint={"every_steps": 0},
        monitoring={"progress": "off", "samples_per_step": 0},
    )
    (folder / f"{name}.started").write_text(str(started_s))


def compare(folder: Path, *, warm_up_steps: int) -> dict[str, float]:
    rows = {name: _rows(folder, name) for name in ("free", "slow")}
    begin_s = max(own[warm_up_steps]["time_s"] for own in rows.values())
    end_s = min(own[-1]["time_s"] for own in rows.values())
    warm = {
        name: [row for row in own if begin_s <= row["time_s"] <= end_s]
        for name, own in rows.items()
    }
    rates = {name: _samples_per_s(own) for name, own in warm.items()}
    loads = [table(row, "scorer/slow") for row in warm["slow"]]
    return {
        "free_samples_per_s": rates["free"],
        "slow_samples_per_s": rates["slow"],
        "ratio": rates["slow"] / rates["free"],
        "seconds": end_s - begin_s,
        "slow_calls_in_flight": _mean([load["busy"] * load["concurrency"] for load in loads]),
        "slow_waited_for_scores": _mean(
            [row.get("waiting/trainer/scores", 0.0) for row in warm["slow"]]
        ),
        "free_staleness": _mean([row["staleness/mean"] for row in warm["free"]]),
        "slow_staleness": _mean([row["staleness/mean"] for row in warm["slow"]]),
    }


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Metrics of one run, with times on a clock that both runs share."""
    started_s = float((folder / f"{name}.started").read_text())
    rows = read_metrics(folder / name / "metrics.jsonl")
    return [{**row, "time_s": started_s + row["time_s"]} for row in rows]


def _samples_per_s(rows: Sequence[dict[str, Any]]) -> float:
    seconds = rows[-1]["time_s"] - rows[0]["time_s"]
    return (len(rows) - 1) * GROUPS * GROUP_SIZE / seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    raise SystemExit(main())
