"""A run directory such as a real run leaves behind, made in milliseconds."""

import math
import random
from pathlib import Path
from typing import Any

from millrace.config import load_config
from millrace.core.spans import Span
from millrace.monitoring.files.metrics import MetricsLog
from millrace.monitoring.files.trace import TraceWriter
from millrace.monitoring.run_dir import RunDir

START_S = 1_700_000_000.0


def metrics_row(step: int, *, steps: int = 40) -> dict[str, Any]:
    """Keys as the controller writes them; the reward climbs from about 0.2 to about 0.9."""
    noise = random.Random(step).gauss(0, 0.02)
    reward = 0.2 + 0.7 / (1 + math.exp(-(step - steps / 2) / (steps / 10))) + noise
    row = {
        "step": step,
        "version": step,
        "time_s": step * 0.5,
        "reward/mean": reward,
        "reward/std": 0.3,
        "rewards/correct/mean": reward,
        "loss": 0.01,
        "staleness/mean": 0.8,
        "staleness/max": 2,
        "staleness/share": {"0": 0.3, "1": 0.6, "2": 0.1},
        "version_spread/rollout_mean": 0.25,
        "version_spread/group_mean": 0.75,
        "throughput/samples_per_s": 128.0,
        "throughput/tokens_per_s": 2000.0,
        "throughput/samples": 64 * step,
        "throughput/tokens": 1000 * step,
        "throughput/time_s": step * 0.5,
        "buffer/depth": 5,
        "groups/running": 12,
        "dropped": {"too_stale": step // 10},
        "cancelled": {"generating": step // 8},
        "tokens/saved": 20 * step,
        "tokens/wasted": {"dropped": 3 * step, "cancelled": 10 * step},
        "tokens/wasted_staleness": {"dropped": 3.0, "cancelled": 2.5},
        "failed": {"reward_raised": step // 20},
        "busy/engine": 0.75,
        "busy/trainer": 0.5,
    }
    if step % 20 == 0:
        row |= {"eval/accuracy": reward, "eval/step": step}
    return row


def spans(seconds: int) -> list[Span]:
    """Two workers, in a rhythm of one second: the engine is busy 3/4 of it, the trainer 1/2."""

    def span(worker: str, name: str, busy: bool, start: float, end: float) -> Span:
        begin = START_S + start
        return Span(worker=worker, name=name, busy=busy, start_s=begin, end_s=START_S + end)

    found = [span("engine-0", "start", True, 0, 1), span("trainer", "start", True, 0, 1)]
    for second in range(1, seconds):
        found += [
            span("engine-0", "generate", True, second, second + 0.7),
            span("engine-0", "swap", True, second + 0.7, second + 0.75),
            span("engine-0", "buffer full", False, second + 0.75, second + 1),
            span("trainer", "generation", False, second, second + 0.3),
            span("trainer", "scores", False, second + 0.3, second + 0.5),
            span("trainer", "step", True, second + 0.5, second + 0.9),
            span("trainer", "publish", True, second + 0.9, second + 1),
        ]
    return found


def make_run(path: Path, *, steps: int = 40, finished: bool = True) -> RunDir:
    """`finished=False`: the run was killed; no summary, and files cut in the middle of a line."""
    run_dir = RunDir(path)
    run_dir.open(load_config({"model": "some/model", "run_dir": str(path)}))
    log = MetricsLog(run_dir.metrics)
    for step in range(1, steps + 1):
        log.write(metrics_row(step, steps=steps))
    log.close()
    trace = TraceWriter(run_dir.trace, start_s=START_S)
    trace.write(spans(steps // 2))
    (run_dir.checkpoints / f"step_{steps}").mkdir()
    if finished:
        trace.close()
        run_dir.write_summary(
            {
                "accuracy_before": 0.31,
                "accuracy_after": 0.94,
                "seconds": steps * 0.5,
                "samples_per_s": 128.0,
                "run_dir": str(path),
            }
        )
    else:
        for file, cut in ((run_dir.metrics, '{"step": 4'), (run_dir.trace, ',\n{"name": "st')):
            with file.open("a") as unfinished:
                unfinished.write(cut)
    run_dir.close()
    return run_dir
