"""`millrace bench pipeline`: the same work synchronously and asynchronously, on the same cores.

Synchronous is staleness 0: generation and training take turns, and each may use all cores while it
runs; since small matrices gain little from more threads, it is measured with all and with half of
them, and the faster counts. Asynchronous gives each its own half of the cores. Rates are taken from
the steps after the first few, so that process start-up counts for neither.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.bench import bench_parser, write_result
from millrace.cluster.process import available_cores
from millrace.monitoring.activity import mean_by_role, total_shares
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.trace import read_trace
from millrace.run.train import train

WARM_UP_STEPS = 3
GROUPS, GROUP_SIZE = 8, 8  # per step


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("pipeline")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (20)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest completion (256)")
    parser.add_argument("--staleness", type=int, default=4, help="limit of the async run (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", metavar="DIR", help="keep the two run directories here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        result = measure(Path(args.keep or scratch), args)
    print(_table(result))
    write_result(result, args.json)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from millrace.bench.workloads import distinct_share, make_long_tailed_model

    make_long_tailed_model(folder / "model", seed=args.seed)
    cores = available_cores()
    half = max(1, cores // 2)
    runs = {"sync": (0, cores), "sync, half": (0, half), "async": (args.staleness, half)}
    measured: dict[str, dict[str, Any]] = {}
    for name, (limit, threads) in runs.items():
        result = train(
            model=str(folder / "model"),
            run_dir=str(folder / name.replace(", ", "-")),
            seed=args.seed,
            tasks=[{"prompt": f"task{number:04}"} for number in range(1024)],
            scorers=[distinct_share],
            sampling={"max_new_tokens": args.max_new_tokens},
            rollout={"group_size": GROUP_SIZE},
            buffer={"max_staleness": limit},
            trainer={"steps": args.steps, "groups_per_step": GROUPS},
            optimizer={"learning_rate": 1e-7},
            engine={"max_sequences": GROUPS * GROUP_SIZE},
            cluster={"threads": threads},
            scoring={"workers": 1},
            checkpoint={"every_steps": 0},
            monitoring={"progress": "off", "samples_per_step": 0},
        )
        measured[name] = {"threads": threads, **_rates(result.run_dir)}
    sync = max(measured["sync"], measured["sync, half"], key=lambda run: run["samples_per_s"])
    both = measured["async"]
    return {
        "sync_samples_per_s": sync["samples_per_s"],
        "async_samples_per_s": both["samples_per_s"],
        "speedup": both["samples_per_s"] / sync["samples_per_s"],
        "engine_busy": both["busy"]["engine"],
        "trainer_busy": both["busy"]["trainer"],
        "idle_reasons": both["waiting"],
        "runs": measured,
        "cores": cores,
        "steps": args.steps,
        "max_new_tokens": args.max_new_tokens,
        "max_staleness": args.staleness,
    }


def _rates(run_dir: Path) -> dict[str, Any]:
    rows, spans = read_metrics(run_dir / "metrics.jsonl"), read_trace(run_dir / "trace.json")
    episodes = GROUPS * GROUP_SIZE * (len(rows) - WARM_UP_STEPS)
    start_s, end_s = rows[WARM_UP_STEPS - 1]["time_s"], rows[-1]["time_s"]
    timed = [span for span in spans if span.start_s >= start_s and span.end_s <= end_s]
    roles = mean_by_role(total_shares(timed))
    return {
        "samples_per_s": episodes / (end_s - start_s),
        "completion_tokens_mean": sum(r["completion_length/mean"] for r in rows) / len(rows),
        "staleness_mean": sum(r["staleness/mean"] for r in rows) / len(rows),
        "busy": {role: shares.busy for role, shares in roles.items()},
        "waiting": {role: shares.waiting for role, shares in roles.items()},
    }


def _table(result: dict[str, Any]) -> str:
    headings = ("samples/s", "threads each", "engine busy", "trainer busy", "staleness")
    lines = [f"{'':12}" + "".join(f"{heading:>14}" for heading in headings)]
    for name, run in result["runs"].items():
        busy = run["busy"]
        lines.append(
            f"{name:12}{run['samples_per_s']:14.1f}{run['threads']:14}{busy['engine']:14.0%}"
            f"{busy['trainer']:14.0%}{run['staleness_mean']:14.2f}"
        )
    lines.append(f"speedup {result['speedup']:.2f}x on {result['cores']} cores")
    for role in ("engine", "trainer"):
        reasons = sorted(result["idle_reasons"][role].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{share:.0%} {reason}" for reason, share in reasons if share >= 0.005)
        lines.append(f"async {role} waits for: {shown or 'nothing'}")
    return "\n".join(lines)
