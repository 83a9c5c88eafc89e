"""`millrace plan --calibrate`: measures this machine with the model of a run, in about a minute.

Three short runs with the user's own settings measure all that a run costs, not only its kernels. In
two of them generation and training alternate, with small batches and with large ones: their busy
times give the costs per decode step and per sequence, per train step and per token, and the times
between. In the third they overlap, which shows how much workers slow each other down. From
their memory follows that of a run, and of each token in training.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from millrace.cluster.process import available_cores
from millrace.compare.runs import train_process
from millrace.config import RunConfig, load_config, parse_override
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.spans import Span
from millrace.monitoring.activity import role_of
from millrace.monitoring.files.episodes import read_lifecycle
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir, steps_in
from millrace.plan.lengths import Lengths, read_lengths
from millrace.plan.model_costs import Calibration, ModelShape
from millrace.plan.simulation import Prediction, simulate

# By device: steps that warm up; steps, groups per step and sequences of each trial. A GPU needs
# more of all: its first steps tune kernels, and small batches do not fill it.
_WARM_UP = {"cpu": 2, "cuda": 6}
_TRIALS = {
    "cpu": {"small": (6, 2, 4), "large": (6, 8, 64), "overlapping": (12, 6, 32)},
    "cuda": {"small": (14, 4, 16), "large": (14, 24, 192), "overlapping": (24, 12, 128)},
}
_SYNC = {"buffer.max_staleness": 0, "weights.interrupt": "barrier"}
_ASYNC = {"buffer.max_staleness": 4, "weights.interrupt": "swap"}
_ALWAYS = {"buffer.capacity": 64, "evaluate.every_steps": 0, "checkpoint.every_steps": 0}


def predict(
    found: Calibration, config: RunConfig, shape: ModelShape, lengths: Lengths, **counts: int
) -> Prediction:
    """`counts`: steps and warm_up of the simulation."""
    if dict(found.shape) != asdict(shape):
        raise ConfigError("This machine was measured with another model; add --calibrate.")
    workers = config.engine.num_local + config.trainer.num_ranks
    threads = config.cluster.threads or max(1, found.num_cores // workers)
    threads = 1 if found.device == "cuda" else threads  # its host has cores enough
    speed_of = partial(found.speed, threads=threads)
    return simulate(config, found, lengths, speed_of=speed_of, **counts)


def microbatch_tokens(config: RunConfig, lengths: Lengths) -> float:
    group_tokens = config.rollout.group_size * lengths.mean + lengths.prompt_tokens
    return min(config.trainer.groups_per_step * group_tokens, config.trainer.microbatch_tokens)


def calibration_file(given: Path | None) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return given or cache / "millrace" / "calibration.json"


def read_calibration(file: Path) -> Calibration:
    try:
        return Calibration(**json.loads(file.read_text()))
    except FileNotFoundError:
        text = "This machine was not measured; add --calibrate, or plan for --gpus N."
        raise ConfigError(text) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"Calibration {str(file)!r} cannot be read: {error}.") from None


def calibrate(source: Path, *, settings: Mapping[str, str], file: Path) -> Calibration:
    """Measure with the settings of a TOML file, and save the result."""
    from millrace.models.loading import resolve_device  # imports torch

    overrides = {key: parse_override(key, value) for key, value in settings.items()}
    placement = load_config(source, overrides=overrides).placement
    device = resolve_device(placement.rank(0)).type
    with tempfile.TemporaryDirectory(prefix="millrace-plan-") as folder:
        small, large, overlapping = (
            _Trial(source, settings, device=device, folder=Path(folder) / name)
            for name in _TRIALS[device]
        )
    shape, sync = ModelShape.read(small.config.model.path), (small, large)
    engine_s, trainer_s = np.array([trial.busy_s for trial in sync]).T
    # Busy times without any cost would be 0; with a cost of 1 per step they count the steps.
    costs: dict[str, Any] = dict.fromkeys(
        ("sequence_s", "train_step_s", "publish_s", "score_s"), 0.0
    )
    costs |= {"decode_step_s": 1.0, "train_token_s": 1.0}
    unit = Calibration(shape=asdict(shape), device=device, num_cores=available_cores(), **costs)
    counted = np.array([trial.predicted_busy_s(unit, shape) for trial in sync])
    per_step, per_sequence = _solve(counted[:, 0], [trial.tokens for trial in sync], engine_s)
    per_update, per_token = _solve([trial.steps for trial in sync], counted[:, 1], trainer_s)
    found = replace(
        unit,
        decode_step_s=per_step,
        sequence_s=per_sequence,
        train_step_s=per_update + fmean(trial.take_s for trial in sync),
        train_token_s=per_token,
        publish_s=fmean(trial.publish_s for trial in sync),
        score_s=fmean(trial.score_s for trial in sync),
    )
    step_tokens = overlapping.predicted_busy_s(unit, shape)[1] / overlapping.steps
    alone_s = per_update + per_token * step_tokens
    found = replace(found, trainer_slowdown=max(1.0, overlapping.train_s / alone_s))
    predicted = predict(found, overlapping.config, shape, overlapping.lengths)
    found = replace(found, engine_slowdown=max(1.0, overlapping.step_s / predicted.step_s))
    trials = (small, large, overlapping)
    tokens = [microbatch_tokens(trial.config, trial.lengths) for trial in trials]
    mib = [trial.peak_mib - found.run_mib(trial.config, shape, tokens=0) for trial in trials]
    token_mib, base_mib = np.polyfit(tokens, mib, 1)
    found = replace(found, base_mib=float(base_mib), token_mib=max(0.0, float(token_mib)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found


def _solve(
    first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray, seconds: np.ndarray
) -> tuple[float, float]:
    """Seconds per unit of each of two causes, from two runs; none is negative."""
    causes = np.array([first, second], dtype=float)
    found = np.linalg.solve(causes.T, seconds)
    if found.min() < 0:  # noise: the larger cause accounts for all
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = seconds.sum() / causes[kept].sum()
    return float(found[0]), float(found[1])


class _Trial:
    """A short run of the user's settings, in a process of its own."""

    def __init__(
        self, source: Path, settings: Mapping[str, str], *, device: str, folder: Path
    ) -> None:
        steps, groups, sequences = _TRIALS[device][folder.name]
        own: dict[str, Any] = {
            **_ALWAYS,
            **(_ASYNC if folder.name == "overlapping" else _SYNC),
            "trainer.steps": steps,
            "trainer.groups_per_step": groups,
            "engine.max_sequences": sequences,
            "run_dir": str(folder),
        }
        changes = {**settings, **{key: json.dumps(value) for key, value in own.items()}}
        options = [f"--{key}={value}" for key, value in changes.items()]
        log = folder.with_suffix(".log")
        ended = train_process(["train", str(source), *options], log=log)
        if ended.error is not None:
            raise RunFailed(f"A short run of the calibration failed: {ended.error}")
        self.peak_mib = ended.peak_gpu_mib or ended.peak_mib
        overrides = {key: parse_override(key, value) for key, value in changes.items()}
        self.config = load_config(source, overrides=overrides)
        self.lengths = read_lengths(str(folder), max_new_tokens=1)
        self._read(RunDir(folder), warm_up=_WARM_UP[device])

    def _read(self, run_dir: RunDir, *, warm_up: int) -> None:
        read = [read_lifecycle(run_dir, step) for step in steps_in(run_dir.lifecycle)]
        lives = [life for life in read if life is not None][warm_up:]
        spans, groups = read_trace(run_dir.trace), [g for life in lives for g in life.groups]
        turns = [turn for g in groups for turns in g.turns.values() for turn in turns]
        self.steps, self.tokens = len(lives), sum(turn.num_tokens for turn in turns)
        # Where generation and training alternate, a step's groups start after the step before it.
        self.busy_s = _busy(spans, min(group.started_s for group in lives[0].groups))
        self.step_s = (lives[-1].end_s - lives[0].begin_s) / len(lives)
        self.score_s = fmean((g.ended_s or 0.0) - (g.generated_s or 0.0) for g in groups)
        ready = (max(g.ended_s or 0.0 for g in life.groups) for life in lives)
        takes = [life.begin_s - end_s for life, end_s in zip(lives, ready, strict=True)]
        self.take_s = max(0.0, fmean(takes))
        trained = [s for s in spans if role_of(s.worker) == "trainer" and s.name == "step"]
        self.train_s = fmean(s.end_s - s.start_s for s in trained[warm_up:])
        ends = [s.end_s for s in trained]
        starts = sorted(s.start_s for s in spans if role_of(s.worker) == "engine" and s.busy)
        gaps = [next((s - end for s in starts if s >= end), None) for end in ends[warm_up:-1]]
        self.publish_s = fmean(gap for gap in gaps if gap is not None)

    def predicted_busy_s(self, calibration: Calibration, shape: ModelShape) -> tuple[float, float]:
        found = predict(calibration, self.config, shape, self.lengths, steps=self.steps, warm_up=0)
        share = self.tokens / (found.tokens_per_s * found.ends_s[-1])
        engine_s, trainer_s = _busy(found.spans, 0.0)
        return engine_s * share, trainer_s


def _busy(spans: Sequence[Span], begin_s: float) -> tuple[float, float]:
    """Seconds of engines and trainer."""
    found = {"engine": 0.0, "trainer": 0.0}
    for span in spans:
        if span.name in ("generate", "drain", "step") and span.end_s > begin_s:
            found[role_of(span.worker)] += span.end_s - max(span.start_s, begin_s)
    return found["engine"], found["trainer"]
