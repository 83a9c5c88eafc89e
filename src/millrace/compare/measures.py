"""What a comparison reports of one run, from the files in its run directory."""

import json
from collections import Counter
from typing import Any

from millrace.monitoring.activity import mean_by_role, total_shares
from millrace.monitoring.files.metrics import read_metrics, run_rates, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir

# What an engine does or waits for only because of new weights. Sequences that end during a drain
# are work, and do not count.
_SYNC = ("swap", "waiting for weights", "drained")


def measure_run(run_dir: RunDir, *, target: float | None) -> dict[str, Any]:
    """None stands for what this run did not measure."""
    rows = read_metrics(run_dir.metrics)
    last = rows[-1]
    summary = json.loads(run_dir.summary.read_text())
    wasted = table(last, "tokens/wasted")
    roles = mean_by_role(total_shares(read_trace(run_dir.trace)))
    engine, trainer = roles.get("engine"), roles.get("trainer")
    sync = {**engine.doing, **engine.waiting} if engine else {}
    seconds = last["throughput/time_s"]
    return {
        "samples_per_s": run_rates(last).get("samples_per_s"),
        "seconds": seconds,
        "time_to_target_s": None if target is None else _time_to(target, rows, summary),
        "accuracy": summary["accuracy_after"],
        "reward": last["reward/mean"],
        "staleness": _staleness(rows),
        "wasted": wasted,
        "wasted_share": sum(wasted.values()) / max(last["throughput/tokens"], 1),
        "engine_idle": engine and 1 - engine.busy,
        "trainer_idle": trainer and 1 - trainer.busy,
        "sync_share": engine and sum(sync.get(name, 0.0) for name in _SYNC),
    }


def _time_to(target: float, rows: list[dict[str, Any]], summary: dict[str, Any]) -> float | None:
    """Training time at the step after which an evaluation reached the target; None if none did."""
    ended_s = {0: 0.0, **{row["step"]: row["throughput/time_s"] for row in rows}}
    measured = {row["eval/step"]: row["eval/accuracy"] for row in rows if "eval/step" in row}
    measured |= {0: summary["accuracy_before"], max(ended_s): summary["accuracy_after"]}
    reached = (step for step, accuracy in measured.items() if (accuracy or 0.0) >= target)
    return ended_s.get(min(reached, default=-1))


def _staleness(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of trained tokens by staleness; steps count by their mean length."""
    tokens: Counter[int] = Counter()
    whole = sum(row["completion_length/mean"] for row in rows)
    for row in rows:
        for staleness, share in table(row, "staleness/share").items():
            tokens[int(staleness)] += share * row["completion_length/mean"] / whole
    return {str(staleness): share for staleness, share in sorted(tokens.items())}
