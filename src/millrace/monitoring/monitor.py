"""Records a run: metrics per step, spans of every worker, sample episodes, and terminal progress.

Promise: the run directory is readable at any moment. Called from the controller's event loop only.
"""

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from millrace.config import RunConfig
from millrace.core.errors import printable
from millrace.core.files import reason as failure_reason
from millrace.core.records import Group
from millrace.core.spans import Span
from millrace.core.staleness import PolicyVersions
from millrace.monitoring import activity
from millrace.monitoring.callbacks import CallbackList
from millrace.monitoring.files.episodes import StepRecorder
from millrace.monitoring.files.metrics import (
    MetricsLog,
    Throughput,
    group_metrics,
    read_metrics,
    run_rates,
)
from millrace.monitoring.files.trace import TraceWriter
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.progress import ProgressDisplay, make_progress
from millrace.monitoring.terminal.snapshot import RunGauges, RunSnapshot
from millrace.monitoring.trackers import TrackerProcess

REFRESH_S = 0.25


class RunMonitor:
    """Owns the files that a run writes for its user, its trackers, callbacks and progress."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: RunDir,
        resume_from: int | None,
        progress: ProgressDisplay | None = None,
        decode: Callable[[np.ndarray], str] = lambda tokens: "",
        callbacks: CallbackList | None = None,
        curve: str = "reward/mean",
    ) -> None:
        """`resume_from` is the step that a resumed run starts from; `decode`: the text of tokens,
        as of the policy's tokenizer; `curve`: the metric that the progress shows."""
        self._curve = curve
        self._steps = config.trainer.steps
        self._capacity = config.buffer_capacity
        self._run_dir = run_dir
        self._metrics = MetricsLog(run_dir.metrics, resume_from=resume_from)
        trace = TraceWriter(run_dir.trace, resume=resume_from is not None)
        self._trace: TraceWriter | None = trace
        self._zero_s = time.monotonic() - (time.time() - trace.start_s)
        self.recorder = StepRecorder(config, run_dir, decode=decode)
        self._progress = progress or make_progress(config.monitoring.progress)
        tables = [table.type_settings for table in config.tracker]
        self._trackers = [TrackerProcess(table, warn=self.warn) for table in tables]
        for tracker in self._trackers:
            settings = config.model_dump(mode="json")
            tracker.open(run_dir.path, settings=settings, resume_from=resume_from)
        self._callbacks = callbacks or CallbackList()
        self._activity = activity.Activity()
        self._scorer_rates = activity.ScorerRates()
        earlier = read_metrics(run_dir.metrics)  # rows of the run that this one resumes
        self._last_row: dict[str, Any] = earlier[-1] if earlier else {}
        self._started_s = time.monotonic() - self._last_row.get("time_s", 0.0)
        self._throughput = Throughput(earlier=self._last_row)
        self.episodes = 0  # trained by this process
        self._values, self._evaluations = array("d"), array("d")
        for row in earlier:
            self._add_value(row)
        self._new_evaluation: dict[str, Any] = {}  # not yet in a row
        self._has_shown_failure = False
        self._gauges: Callable[[], RunGauges] | None = None
        self.restarts: Counter[str] = Counter()  # so far, by worker
        self._phases: dict[str, str] = {}  # by worker, while it starts

    def starting(self, worker: str, phase: str | None) -> None:
        """A worker enters a phase of its start-up, such as "loading"; None = ready."""
        self._phases[worker] = phase or "ready"
        self._progress.starting(worker, phase or "ready")

    def now(self) -> float:
        """Seconds on the clock of trace.json."""
        return round(time.monotonic() - self._zero_s, 4)

    def begin_training(self) -> None:
        """Throughput is measured from here on."""
        self._throughput.begin()

    async def run(self, gauges: Callable[[], RunGauges]) -> None:
        """Keep the progress view up to date. Ends only by cancellation."""
        self._gauges = gauges
        self._progress.start()
        while True:
            self._show(gauges())
            await asyncio.sleep(REFRESH_S)

    def on_progress(
        self, worker: str, *, spans: Sequence[Span], counters: dict[str, float]
    ) -> None:
        """A worker has reported what it did."""
        if "generated_tokens" in counters and activity.role_of(worker) == "engine":
            self._throughput.report(worker, round(counters["generated_tokens"]))
        phase = activity.STARTING.get(spans[-1].name) if spans else None
        if phase is not None and self._phases.get(worker) != phase:
            self.starting(worker, phase)
        if self._gauges is not None:
            gauges = cache(self._gauges)  # they are costly, and most reports need none
            spans = [_with_wait_reason(span, gauges) for span in spans]
        self._activity.add(spans)
        try:
            if self._trace is not None:
                self._trace.write(spans)
        except OSError as error:  # it ends neither the run nor the worker that reports
            self._trace = None
            self.warn(
                f"trace.json cannot be written any more ({failure_reason(error)}); the run"
                " continues without it."
            )

    def step(
        self,
        gauges: RunGauges,
        *,
        groups: Sequence[Group],
        trainer_metrics: dict[str, float],
        replayed: Collection[int] = (),
        versions: PolicyVersions | None = None,
    ) -> None:
        """A step at trainer version `gauges.version` is done; the next version is one higher.
        `replayed`: numbers of the groups that an earlier step has trained on. `versions`: None =
        there is one policy."""
        step = gauges.version + 1
        fresh = [group for group in groups if group.number not in replayed]
        num_episodes = sum(len(group.episodes) for group in fresh)
        self.episodes += num_episodes
        self._throughput.step(num_episodes)
        numbers = self._write_row(
            step,
            {
                **trainer_metrics,
                **group_metrics(groups, fresh=fresh, version=gauges.version, versions=versions),
                **self._gauge_metrics(gauges, num_replayed=len(groups) - len(fresh)),
            },
        )
        for group in fresh:
            self._callbacks.call("on_group", group)
        self._callbacks.call("on_step", numbers)

    def supervised_step(
        self, step: int, *, num_examples: int, trained_tokens: int, metrics: Mapping[str, Any]
    ) -> None:
        """A step of supervised fine-tuning is done; `trained_tokens`: of all steps so far."""
        self.episodes += num_examples
        self._throughput.report("trainer", trained_tokens)
        self._throughput.step(num_examples)
        workers = {"busy": self._busy("trainer"), "restarts": dict(self.restarts)}
        self._callbacks.call("on_step", self._write_row(step, {**metrics, **workers}))

    def _write_row(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write the row of a step to metrics.jsonl and the trackers; returns what is not null."""
        time_s = round(time.monotonic() - self._started_s, 3)
        rates, found = {"throughput": self._throughput.row()}, self._new_evaluation
        table = {"step": step, "version": step, "time_s": time_s, **metrics, **rates, **found}
        row = self._last_row = self._metrics.write(table)
        self._new_evaluation = {}
        self._add_value(row)
        numbers = {name: value for name, value in row.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(step, numbers)
        return numbers

    def _add_value(self, row: Mapping[str, Any]) -> None:
        if row[self._curve] is not None:  # a loss that was not finite
            self._values.append(row[self._curve])

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """An evaluation is over; the next row holds its metrics."""
        what = "accuracy" if "eval/accuracy" in metrics else "loss"
        value = metrics[f"eval/{what}"]
        self._evaluations.append(value)
        self._new_evaluation = metrics
        passes = [f", {name} {value:.3f}" for name, value in metrics.items() if "pass@" in name]
        self._progress.note(
            f"held-out {what} after step {metrics['eval/step']}: {value:.3f}"
            f"{''.join(passes[-1:]).replace('eval/', '')}"
        )
        self._callbacks.call("on_evaluation", metrics)

    def saved(self, checkpoint: Path) -> None:
        self._callbacks.call("on_checkpoint", checkpoint)

    def restarted(self, worker: str, reason: str) -> None:
        """A worker died, and a new one is started in its place."""
        self.restarts[worker] += 1
        self.warn(f"{reason} (restart {self.restarts[worker]} of {worker})")

    def run_rates(self) -> dict[str, float]:
        """Mean samples/s and tokens/s of the run so far; {} before the first step."""
        return run_rates(self._last_row)

    def warn(self, sentence: str) -> None:
        self._progress.note(f"warning: {sentence}")
        # A full disk must not end a run that only has something to say.
        with contextlib.suppress(OSError), self._run_dir.warnings.open("a") as file:
            file.write(f"{time.strftime('%F %T')} {printable(sentence)}\n")
        for tracker in self._trackers:
            tracker.alert(sentence)

    def close(self) -> None:
        if self._gauges is not None:
            self._show(self._gauges())
        self._progress.stop()
        if self._trace is not None:
            self._trace.close()
        self._metrics.close()
        for tracker in self._trackers:
            tracker.close()

    def _busy(self, *roles: str) -> dict[str, float]:
        found = activity.mean_by_role(self._activity.recent())
        return {role: found[role].busy if role in found else 0.0 for role in roles}

    def _gauge_metrics(self, gauges: RunGauges, *, num_replayed: int) -> dict[str, Any]:
        recent = self._activity.recent()
        return {
            "busy": self._busy(*activity.ROLES),
            "waiting": {worker: shares.waiting for worker, shares in recent.items() if shares},
            "buffer": {"depth": gauges.buffer_depth},
            "groups": {"running": gauges.groups_running, "replayed": num_replayed},
            "dropped": gauges.groups_dropped,
            "cancelled": gauges.groups_cancelled,
            "failed": gauges.groups_failed,
            "skipped": {"steps": gauges.steps_skipped},
            "tokens": {
                "saved": gauges.tokens_saved,
                "wasted": gauges.tokens_wasted,
                "wasted_staleness": gauges.wasted_staleness,
                "resumed": gauges.resumed_tokens,
            },
            "sequences": {"resumed": gauges.sequences_resumed},
            "scorer": self._scorer_rates.row(gauges.scorers),
            "restarts": dict(self.restarts),
        }

    def _show(self, gauges: RunGauges) -> None:
        if gauges.groups_failed and not self._has_shown_failure:
            self._has_shown_failure = True
            self._progress.note(
                f"a group failed (later failures are only counted): {gauges.last_failure}"
            )
        workers = self._activity.recent()
        self._progress.show(
            RunSnapshot(
                run_dir=str(self._run_dir.path),
                gauges=gauges,
                steps=self._steps,
                elapsed_s=time.monotonic() - self._started_s,
                eta_s=self._throughput.eta_s(self._steps - gauges.version),
                curve=self._curve.partition("/")[0],
                values=self._values[:],
                evaluations=self._evaluations[:],
                **self._throughput.current(),
                tokens_generated=self._throughput.tokens,
                buffer_capacity=self._capacity,
                staleness_mean=self._last_row.get("staleness/mean", 0.0),
                staleness_max=self._last_row.get("staleness/max", 0),
                workers=workers,
                phases=self._phases,
                scoring=activity.limit_text(
                    gauges.scorers, waited=activity.waited_for_scores(workers)
                ),
                restarts=dict(self.restarts),
            )
        )


def _with_wait_reason(span: Span, gauges: Callable[[], RunGauges]) -> Span:
    """A worker knows only that it has nothing to do; the controller knows why."""
    if span.worker.startswith("engine") and span.name == "no work":
        return replace(span, name=gauges().engine_waits_for)
    if span.worker.startswith("trainer") and span.name == "a batch":
        return replace(span, name=gauges().trainer_waits_for)
    return span
