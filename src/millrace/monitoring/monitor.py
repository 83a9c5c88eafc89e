"""Writes down what a run does: metrics per step, spans of every worker, samples to read, progress
to see.

Promise: the run directory is readable at any moment. Called from the controller's event loop only.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.config import RunConfig
from millrace.core import files as storage
from millrace.core.records import Group
from millrace.core.spans import ScorerLoad, Span
from millrace.monitoring.activity import Activity, Shares, mean_by_role, role_of
from millrace.monitoring.files.episodes import EpisodeLog, SampleLog
from millrace.monitoring.files.metrics import MetricsLog, read_metrics
from millrace.monitoring.files.tensorboard import TensorBoardLog
from millrace.monitoring.files.trace import TraceWriter
from millrace.monitoring.rates import ScorerRates, Thinned, limit_text, staleness_metrics
from millrace.monitoring.run_dir import RunDir
from millrace.monitoring.terminal.progress import make_progress
from millrace.monitoring.terminal.snapshot import RunSnapshot

REFRESH_S = 0.25
SCORES = "scores"  # what the trainer and engines wait for when scoring is behind
RATE_WINDOW_S = 10.0  # progress shows rates over about this long


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGauges:
    """What only the controller knows, right now."""

    version: int
    buffer_depth: int
    groups_running: int
    groups_dropped: dict[str, int]  # so far, by reason
    groups_cancelled: dict[str, int]  # tries at groups that grew too old, by what they did then
    tokens_saved: int  # which these would still have sampled; estimated
    tokens_wasted: dict[str, int]  # sampled and never to be trained, by reason
    wasted_staleness: dict[str, float]  # of these, on average
    groups_failed: dict[str, int]
    steps_skipped: int  # so far; of these an update or more was not finite
    last_failure: str  # the newest failure's sentence, or ""
    engine_waits_for: str  # why an engine without work has none
    trainer_waits_for: str
    scorers: dict[str, ScorerLoad]
    sequences_continued: int = 0  # so far: that went on after their engine had died
    resumed_tokens: int = 0  # so far: told before a crash of the controller, and not sampled again
    scorers_lost: int = 0  # processes so far that hung or died, and were replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """Totals at one instant; rates are differences of two."""

    time_s: float
    episodes: int
    generated_tokens: float


class RunMonitor:
    def __init__(self, config: RunConfig, *, run_dir: RunDir, resume_from: int | None) -> None:
        self._steps = config.trainer.steps
        self._capacity = config.buffer.capacity
        self._run_dir = run_dir
        self._metrics = MetricsLog(run_dir.metrics, resume_from=resume_from)
        self._trace: TraceWriter | None = TraceWriter(
            run_dir.trace, earlier=run_dir.earlier_trace, resume=resume_from is not None
        )
        self._samples = SampleLog(run_dir.rollouts, per_step=config.watch.samples_per_step)
        self._recordings = EpisodeLog(
            run_dir.episodes, per_step=config.watch.record_episodes, model=config.model.path
        )
        self._tensorboard = (
            TensorBoardLog(run_dir.tensorboard, resume_from=resume_from)
            if config.watch.tensorboard
            else None
        )
        self._progress = make_progress(config.watch.progress)
        self._activity = Activity()
        self._scorer_rates = ScorerRates()
        earlier = read_metrics(run_dir.metrics)  # of the part that this run continues
        self._started_s = time.monotonic() - (earlier[-1]["time_s"] if earlier else 0.0)
        self._generated: dict[str, float] = {}  # tokens so far, by engine
        self.episodes = 0  # trained so far
        self._marks = [self._mark()]
        self._rewards, self._accuracies = Thinned(), Thinned()
        for row in earlier:
            self._rewards.add(row["reward_mean"])
        self._new_evaluation: dict[str, Any] = {}  # not yet in a row
        self._staleness = (0.0, 0)
        self._failures_noted = 0
        self._moment: Callable[[], RunGauges] | None = None
        self._restarts: Counter[str] = Counter()  # by worker, of those that died

    async def run(self, moment: Callable[[], RunGauges]) -> None:
        """Keep the progress view up to date. Ends only by cancellation."""
        self._moment = moment
        self._progress.start()
        while True:
            self._show(moment())
            await asyncio.sleep(REFRESH_S)

    def heard(self, worker: str, *, spans: Sequence[Span], counters: dict[str, float]) -> None:
        """A worker's Progress message."""
        if "generated_tokens" in counters and role_of(worker) == "engine":
            self._generated[worker] = counters["generated_tokens"]
        if self._moment is not None:
            spans = [_explained(span, self._moment()) for span in spans]
        self._activity.add(spans)
        self._write_trace(spans)

    def step(
        self,
        moment: RunGauges,
        *,
        groups: Sequence[Group],
        trainer_metrics: dict[str, float],
        replayed: Collection[int] = (),
    ) -> None:
        """A step at trainer version `moment.version` is done; the next version is one higher.
        `replayed`: numbers of the groups that were told of before."""
        step = moment.version + 1
        fresh = [group for group in groups if group.number not in replayed]
        self.episodes += sum(len(group.episodes) for group in fresh)
        self._marks = [*self._marks[-200:], self._mark()]
        row = {
            "step": step,
            "version": step,
            "time_s": round(time.monotonic() - self._started_s, 3),
            **_scores(fresh),
            **_happenings(fresh),
            **trainer_metrics,
            **_teachers(groups),
            **staleness_metrics(groups, version=moment.version),
            **self._rates(self._window_start()),
            **self._shares(),
            "completion_tokens_mean": float(
                np.mean([rollout.num_generated for group in groups for rollout in group.rollouts])
            ),
            "buffer_depth": moment.buffer_depth,
            "groups_running": moment.groups_running,
            "groups_dropped": moment.groups_dropped,
            "groups_cancelled": moment.groups_cancelled,
            "tokens_saved": moment.tokens_saved,
            "tokens_wasted": moment.tokens_wasted,
            "wasted_staleness": moment.wasted_staleness,
            "groups_failed": moment.groups_failed,
            "steps_skipped": moment.steps_skipped,
            "replayed_groups": len(groups) - len(fresh),
            "scorers": self._scorer_rates.row(moment.scorers),
            "scores_waited": self._waited_for_scores(),
            "worker_restarts": self.restarts(moment),
            "sequences_continued": moment.sequences_continued,
            "resumed_tokens": moment.resumed_tokens,
        }
        row |= self._new_evaluation
        self._new_evaluation = {}
        self._rewards.add(row["reward_mean"])
        self._staleness = (row["staleness_mean"], row["staleness_max"])
        self._metrics.write(row)
        self._samples.write(step, fresh)
        self._recordings.write(step, fresh)
        if self._tensorboard is not None:
            self._tensorboard.write(step, row)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """An evaluation is over; the next row holds it."""
        self._accuracies.add(metrics["accuracy"])
        self._new_evaluation = metrics
        step, accuracy = metrics["evaluation_step"], metrics["accuracy"]
        passes = [f", {name} {value:.3f}" for name, value in metrics.items() if "pass@" in name]
        self._progress.note(
            f"held-out accuracy after step {step}: {accuracy:.3f}{''.join(passes[-1:])}"
        )

    def restarted(self, worker: str, reason: str) -> None:
        """A worker died, and is started again."""
        self._restarts[worker] += 1
        self.warn(f"{reason} (restart {self._restarts[worker]} of {worker})")

    def restarts(self, moment: RunGauges) -> dict[str, int]:
        """How often each worker had to be started again; the scorers' together."""
        scorers = {"scorers": moment.scorers_lost} if moment.scorers_lost else {}
        return {**self._restarts, **scorers}

    def warn(self, sentence: str) -> None:
        self._progress.note(f"warning: {sentence}")

    def close(self) -> None:
        if self._moment is not None:
            self._show(self._moment())
        self._progress.stop()
        if self._trace is not None:
            self._trace.close()
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_trace(self, spans: Sequence[Span]) -> None:
        """No run ends for want of it, and no worker whose spans these are."""
        if self._trace is None:
            return
        try:
            self._trace.write(spans)
        except OSError as error:
            self._trace = None
            self.warn(
                f"trace.json cannot be written any more ({storage.reason(error)}); the run goes on"
                " without it."
            )

    def _show(self, moment: RunGauges) -> None:
        failed = sum(moment.groups_failed.values())
        if failed and not self._failures_noted:
            self._progress.note(
                f"a group failed (more will only be counted): {moment.last_failure}"
            )
            self._failures_noted = failed
        elapsed_s = time.monotonic() - self._started_s
        rates = self._rates(self._window_start())
        self._progress.show(
            RunSnapshot(
                run_dir=str(self._run_dir.path),
                step=moment.version,
                steps=self._steps,
                version=moment.version,
                elapsed_s=elapsed_s,
                eta_s=self._eta(moment.version),
                rewards=self._rewards.values,
                accuracies=self._accuracies.values,
                samples_per_s=rates["samples_per_s"],
                tokens_per_s=rates["tokens_per_s"],
                tokens_wasted=sum(moment.tokens_wasted.values()),
                tokens_generated=round(sum(self._generated.values())),
                buffer_depth=moment.buffer_depth,
                buffer_capacity=self._capacity,
                groups_running=moment.groups_running,
                staleness_mean=self._staleness[0],
                staleness_max=self._staleness[1],
                workers=self._activity.recent(),
                dropped=moment.groups_dropped,
                cancelled=moment.groups_cancelled,
                failed=moment.groups_failed,
                steps_skipped=moment.steps_skipped,
                scoring=limit_text(moment.scorers, waited=self._waited_for_scores()),
                restarts=self.restarts(moment),
            )
        )

    def _mark(self) -> _Mark:
        return _Mark(
            time_s=time.monotonic(),
            episodes=self.episodes,
            generated_tokens=sum(self._generated.values()),
        )

    def _window_start(self) -> _Mark:
        horizon_s = time.monotonic() - RATE_WINDOW_S
        return next((mark for mark in self._marks if mark.time_s >= horizon_s), self._marks[-1])

    def _rates(self, since: _Mark) -> dict[str, float]:
        now = self._mark()
        seconds = max(now.time_s - since.time_s, 1e-9)
        return {
            "samples_per_s": (now.episodes - since.episodes) / seconds,
            "tokens_per_s": (now.generated_tokens - since.generated_tokens) / seconds,
        }

    def _eta(self, step: int) -> float | None:
        if len(self._marks) < 2:
            return None
        per_step_s = (self._marks[-1].time_s - self._marks[0].time_s) / (len(self._marks) - 1)
        return per_step_s * (self._steps - step)

    def _waited_for_scores(self) -> float:
        """The share of its recent time that the trainer has spent so."""
        trainer = self._activity.recent().get("trainer")
        return 0.0 if trainer is None else trainer.waiting.get(SCORES, 0.0)

    def _shares(self) -> dict[str, Any]:
        recent = self._activity.recent()
        roles = mean_by_role(recent)
        idle = Shares(busy=0.0, doing={}, waiting={})
        return {
            "engine_busy": roles.get("engine", idle).busy,
            "trainer_busy": roles.get("trainer", idle).busy,
            "wait_reasons": {w: shares.waiting for w, shares in recent.items() if shares},
        }


def _explained(span: Span, moment: RunGauges) -> Span:
    """A worker knows only that it has nothing to do; the controller knows why."""
    if span.worker.startswith("engine") and span.name == "no work":
        return replace(span, name=moment.engine_waits_for)
    if span.worker.startswith("trainer") and span.name == "a batch":
        return replace(span, name=moment.trainer_waits_for)
    return span


def _scores(groups: Sequence[Group]) -> dict[str, Any]:
    scores = [score for group in groups for score in group.scores]
    totals = np.array([score.total for score in scores])
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, part in score.parts.items():
            own = parts.setdefault(name, [])
            own += [] if part is None else [part]
    shares = {name: len(values) / len(scores) for name, values in parts.items()}
    return {
        "reward_mean": float(totals.mean()),
        "reward_std": float(totals.std()),
        "score_parts": {name: float(np.mean(own)) for name, own in parts.items() if own},
        # Of the episodes it applied to, where a gate or the scorer itself left some out.
        "score_shares": {name: share for name, share in shares.items() if share < 1},
        **_by_source(groups),
    }


def _happenings(groups: Sequence[Group]) -> dict[str, Any]:
    """What was counted in episodes of many turns, and how they ended."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    endings = Counter(episode.ending for episode in episodes)
    return {
        "turns_mean": float(np.mean([len(episode.turns) for episode in episodes])),
        "episodes_cut": {e: n for e, n in endings.items() if e != "done"},
        "episode_counts": dict(counts),
    }


def _by_source(groups: Sequence[Group]) -> dict[str, Any]:
    """The mean reward of each source, where there are several; one without groups in this step is
    left out."""
    totals: dict[str, list[float]] = {}
    for group in groups:
        if group.task.source:
            own = totals.setdefault(group.task.source, [])
            own += [score.total for score in group.scores]
    if not totals:
        return {}
    return {"reward_by_source": {name: float(np.mean(own)) for name, own in totals.items()}}


def _teachers(groups: Sequence[Group]) -> dict[str, float]:
    """Which version of the policy taught, on average, where its own past does."""
    taught = [r.teaching for group in groups for r in group.rollouts if r.teaching is not None]
    versions = [teaching.version for teaching in taught if teaching.version is not None]
    return {"teacher_version": float(np.mean(versions))} if versions else {}
