"""`millrace bench pipeline`: the same work synchronously and asynchronously, on the same cores.

Synchronous is staleness 0: generation and training take turns, and each has all cores while it
runs. Asynchronous gives each its own half of the cores. Rates are taken from the steps after the
first few, so that process start-up counts for neither.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.core.machine import available_cores
from millrace.core.spans import Span
from millrace.run import train
from millrace.watch.activity import Activity, mean_by_role
from millrace.watch.metrics import read_metrics
from millrace.watch.trace import read_trace

WARM_UP_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="millrace bench pipeline",
        description="Samples per second, sync against async, on a long-tailed workload.",
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (20)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest completion (256)")
    parser.add_argument(
        "--staleness", type=int, default=4, help="limit of the asynchronous run (4)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--keep", metavar="DIR", help="keep the two run directories here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as scratch:
        folder = Path(args.keep or scratch)
        result = measure(
            folder,
            steps=args.steps,
            max_new_tokens=args.max_new_tokens,
            staleness=args.staleness,
            seed=args.seed,
        )
    print(_table(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(
    folder: Path, *, steps: int, max_new_tokens: int, staleness: int, seed: int
) -> dict[str, Any]:
    from millrace.bench.workload import distinct_share, make_long_tailed_model

    make_long_tailed_model(folder / "model", seed=seed)
    cores = available_cores()
    half = max(1, cores // 2)
    measured: dict[str, dict[str, Any]] = {}
    for mode, limit, threads in (("sync", 0, cores), ("async", staleness, half)):
        result = train(
            model=str(folder / "model"),
            run_dir=str(folder / mode),
            seed=seed,
            tasks=[{"prompt": f"task{number:04}"} for number in range(1024)],
            scorers=[distinct_share],
            sampling={"max_new_tokens": max_new_tokens},
            rollout={"group_size": 8},
            buffer={"max_staleness": limit},
            trainer={
                "steps": steps,
                "groups_per_step": 8,
                "learning_rate": 1e-7,
                "threads": threads,
            },
            engine={"threads": threads, "max_sequences": 64},
            scoring={"workers": 1},
            checkpoint={"every_steps": 0},
            watch={"progress": "off", "samples_per_step": 0},
        )
        measured[mode] = _rates(result.run_dir)
    both = measured["async"]
    return {
        "sync_samples_per_s": measured["sync"]["samples_per_s"],
        "async_samples_per_s": both["samples_per_s"],
        "speedup": both["samples_per_s"] / measured["sync"]["samples_per_s"],
        "engine_busy": both["busy"]["engine"],
        "trainer_busy": both["busy"]["trainer"],
        "idle_reasons": both["waiting"],
        "sync": measured["sync"],
        "async": both,
        "cores": cores,
        "steps": steps,
        "max_new_tokens": max_new_tokens,
        "max_staleness": staleness,
    }


def _rates(run_dir: Path) -> dict[str, Any]:
    rows = read_metrics(run_dir / "metrics.jsonl")
    first, last = rows[WARM_UP_STEPS - 1], rows[-1]
    episodes = 64 * (len(rows) - WARM_UP_STEPS)
    spans = _between(read_trace(run_dir / "trace.json"), first["time_s"], last["time_s"])
    activity = Activity()
    activity.add(spans)
    roles = mean_by_role(activity.total())
    return {
        "samples_per_s": episodes / (last["time_s"] - first["time_s"]),
        "completion_tokens_mean": sum(r["completion_tokens_mean"] for r in rows) / len(rows),
        "staleness_mean": sum(r["staleness_mean"] for r in rows) / len(rows),
        "busy": {role: shares.busy for role, shares in roles.items()},
        "waiting": {role: shares.waiting for role, shares in roles.items()},
    }


def _between(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    return [span for span in spans if span.start_s >= start_s and span.end_s <= end_s]


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'':14}{'samples/s':>10}{'engine busy':>13}{'trainer busy':>14}{'staleness':>11}"]
    for mode in ("sync", "async"):
        row = result[mode]
        lines.append(
            f"{mode:14}{row['samples_per_s']:10.1f}{row['busy']['engine']:13.0%}"
            f"{row['busy']['trainer']:14.0%}{row['staleness_mean']:11.2f}"
        )
    lines.append(f"speedup {result['speedup']:.2f}x on {result['cores']} cores")
    for role in ("engine", "trainer"):
        reasons = sorted(result["idle_reasons"][role].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{share:.0%} {reason}" for reason, share in reasons if share >= 0.005)
        lines.append(f"async {role} waits for: {shown or 'nothing'}")
    return "\n".join(lines)
