"""The five interrupt modes on one long-tailed workload, one real run each, on the CPU.

    python benchmarks/interrupts.py --json interrupts.json

All runs have the same model, tasks, batches and cores. Only weights.interrupt differs, and with
"barrier" also buffer.max_staleness, which must be 0 there. Completion lengths are geometric: most
are short, and a few reach the limit. A tiny learning rate keeps the lengths constant.

The columns are shares of the engines' time after the first steps (trace spans, mean over engines):

- idle: the engine has sequences but generates no token because of new weights. It copies weights
  into the model (span "swap"), waits for them with paused sequences ("waiting for weights"), or
  holds back new sequences while none is in flight ("drained"). This is the cost of weight updates.
- draining: the engine generates, but free slots stay empty because waiting sequences are held back
  (span "drain"). This is an upper bound on a further loss.
- turns: the engine has no work, because the trainer has not yet produced the version that the next
  group needs (staleness limit or full buffer).
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from millrace.bench.workloads import distinct_share, make_long_tailed_model
from millrace.cluster.process import available_cores
from millrace.config import Interrupt
from millrace.core.spans import Span
from millrace.monitoring.activity import Shares, mean_by_role, total_shares
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace
from millrace.run.train import train

WARM_UP_STEPS = 3  # left out
GROUPS, GROUP_SIZE = 8, 8  # per step
IDLE, DRAINING = ("swap", "waiting for weights", "drained"), ("drain",)
TURNS = ("staleness limit", "buffer full")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=get_args(Interrupt), action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run (30)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest completion (256)")
    parser.add_argument("--staleness", type=int, default=4, help="limit, except for barrier (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", metavar="DIR", help="keep the run directories here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-interrupts-") as scratch:
        folder = Path(args.keep or scratch)
        make_long_tailed_model(folder / "model", seed=args.seed)
        rows = []
        print(_heading(), flush=True)
        for interrupt in args.mode or get_args(Interrupt):
            rows.append(measure(interrupt, folder=folder, args=args))
            print(_line(rows[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def measure(interrupt: Interrupt, *, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    threads = max(1, available_cores() // 2)
    result = train(
        model=str(folder / "model"),
        run_dir=str(folder / interrupt),
        seed=args.seed,
        tasks=[{"prompt": f"task{number:04}"} for number in range(1024)],
        scorers=[distinct_share],
        sampling={"max_new_tokens": args.max_new_tokens},
        rollout={"group_size": GROUP_SIZE},
        buffer={"max_staleness": 0 if interrupt == "barrier" else args.staleness},
        trainer={"steps": args.steps, "groups_per_step": GROUPS},
        optimizer={"learning_rate": 1e-7},
        engine={"max_sequences": GROUPS * GROUP_SIZE},
        cluster={"threads": threads},
        weights={"interrupt": interrupt},
        scoring={"workers": 1},
        checkpoint={"every_steps": 0},
        monitoring={"progress": "off", "samples_per_step": 0},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    first, last = rows[WARM_UP_STEPS - 1], rows[-1]
    trace = read_trace(result.run_dir / "trace.json")
    engine = _engine_shares(trace, first["time_s"], last["time_s"])
    time_of = {**engine.doing, **engine.waiting}
    steady = rows[WARM_UP_STEPS:]
    return {
        "interrupt": interrupt,
        "samples_per_s": GROUPS * GROUP_SIZE * len(steady) / (last["time_s"] - first["time_s"]),
        "idle_share": sum(time_of.get(name, 0.0) for name in IDLE),
        "draining_share": sum(time_of.get(name, 0.0) for name in DRAINING),
        "turns_share": sum(time_of.get(name, 0.0) for name in TURNS),
        "engine_time": time_of,
        "staleness_mean": sum(row["staleness/mean"] for row in steady) / len(steady),
        "completion_tokens_mean": sum(r["completion_length/mean"] for r in steady) / len(steady),
        "groups_cancelled": table(last, "cancelled"),
        "tokens_wasted": table(last, "tokens/wasted"),
        "tokens_saved": last["tokens/saved"],
    }


def _engine_shares(spans: Sequence[Span], start_s: float, end_s: float) -> Shares:
    timed = [span for span in spans if span.start_s >= start_s and span.end_s <= end_s]
    return mean_by_role(total_shares(timed))["engine"]


def _heading() -> str:
    columns = ("samples/s", "idle", "draining", "turns", "staleness")
    return f"{'':10}" + "".join(f"{column:>12}" for column in columns)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['interrupt']:10}{row['samples_per_s']:12.1f}{row['idle_share']:12.2%}"
        f"{row['draining_share']:12.2%}{row['turns_share']:12.2%}{row['staleness_mean']:12.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
