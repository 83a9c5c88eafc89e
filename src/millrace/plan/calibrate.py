"""`millrace plan --calibrate`: measures this machine with the model of a run, in a minute or two.

Three short runs with the user's own settings measure all that a run costs, not only its kernels. In
two of them generation and training alternate, with small batches and with large ones. The large one
starts all sequences at once: the times of its turns give the costs of a decode step and of its
sequences. The small one has fewer slots than sequences: its first turns show how the cost of a
start depends on the number of sequences, and the rest of its time shows what it costs to start
sequences beside others. The steps of both give the costs per train step, microbatch and token. In
the third run generation and training overlap, which shows how much workers slow each other down.
From the memory of all three follows that of a run, and of each token in training.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tomli_w

from millrace.cluster.process import available_cores
from millrace.compare.runs import train_process
from millrace.config import RunConfig, anchored, load_config, settings_table
from millrace.core.errors import ConfigError, RunFailed
from millrace.core.spans import Span, TurnLife
from millrace.monitoring.activity import role_of
from millrace.monitoring.files.episodes import StepLife, read_lifecycle
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.run_dir import RunDir, steps_in
from millrace.plan.lengths import Lengths, read_lengths
from millrace.plan.model_costs import Calibration, ModelShape
from millrace.plan.simulation import Prediction, simulate

# By device: steps that warm up; steps, groups per step and slots per sequence of a step of each
# trial. A GPU needs more of all: its first steps tune kernels and capture graphs, and small batches
# do not fill it.
_WARM_UP = {"cpu": 2, "cuda": 16}
_TRIALS = {
    "cpu": {"small": (6, 2, 0.5), "large": (6, 8, 1.0), "overlapping": (12, 6, 1.5)},
    "cuda": {"small": (36, 4, 0.5), "large": (32, 24, 1.0), "overlapping": (36, 20, 0.5)},
}
_DRAWN_STEPS = 100  # at most, of which the largest tells the memory of a run
_SYNC = {
    "buffer.max_staleness": 0,
    "buffer.staleness": "oldest",  # without a key enforce
    "weights.interrupt": "barrier",
}
_ASYNC = {"buffer.max_staleness": 4, "weights.interrupt": "swap"}
_ALWAYS = {
    "buffer.capacity": 64,
    "buffer.replay": None,  # alternating steps refuse it, and plans leave it out
    "evaluate.every_steps": 0,
    "checkpoint.every_steps": 0,
}


def predict(
    found: Calibration, config: RunConfig, shape: ModelShape, lengths: Lengths, **counts: int
) -> Prediction:
    """`counts`: steps and warm_up of the simulation."""
    if dict(found.shape) != asdict(shape):
        raise ConfigError("This machine was measured with another model; add --calibrate.")
    workers = config.engine.num_local + config.trainer.num_ranks
    threads = config.cluster.threads or max(1, found.num_cores // workers)
    threads = 1 if found.device == "cuda" else threads  # its host has cores enough
    score_s = found.score_s if lengths.score_s is None else lengths.score_s
    found = replace(found, microbatch_tokens=config.trainer.microbatch_tokens, score_s=score_s)
    speed_of = partial(found.speed, threads=threads)
    return simulate(config, found, lengths, speed_of=speed_of, **counts)


def microbatch_tokens(config: RunConfig, lengths: Lengths) -> float:
    """The tokens of the largest microbatch of a run; a longer sequence gets one of its own."""
    rng, size = np.random.default_rng(config.seed), config.rollout.group_size
    groups = range(config.trainer.groups_per_step)
    steps = [
        sum(np.concatenate(lengths.draw(rng, size)).sum() + lengths.prompt_tokens for _ in groups)
        for _ in range(min(config.trainer.steps, _DRAWN_STEPS))
    ]
    return min(max(steps), max(config.trainer.microbatch_tokens, lengths.longest))


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


def calibrate(given: Mapping[str, Any], *, file: Path) -> Calibration:
    """Measure with these settings, whose paths are absolute, and save the result."""
    from millrace.models.devices import resolve_device  # imports torch

    device = resolve_device(load_config(given).placement.rank(0)).type
    with tempfile.TemporaryDirectory(prefix="millrace-plan-") as folder:
        small, large, overlapping = (
            _Trial(given, device=device, folder=Path(folder) / name) for name in _TRIALS[device]
        )
    shape, sync = ModelShape.read(small.config.model.path), (small, large)
    large_s, decode_step_s, sequence_s = fit_costs(*large.turn_costs())
    begin_s, start_s = start_costs(
        (small.num_first, small.begin_s(sequence_s)), (large.num_first, large_s)
    )
    works, train_s = (
        np.concatenate(part) for part in zip(small.train_steps, large.train_steps, strict=True)
    )
    train_step_s, microbatch_s, train_token_s = fit_costs(works, train_s)
    found = Calibration(
        shape=asdict(shape),
        device=device,
        num_cores=available_cores(),
        decode_step_s=decode_step_s,
        sequence_s=sequence_s,
        first_s=begin_s,
        admit_s=0.0,
        start_s=start_s,
        train_step_s=train_step_s + fmean(trial.take_s for trial in sync),
        microbatch_s=microbatch_s,
        train_token_s=train_token_s,
        publish_s=fmean(trial.publish_s for trial in sync),
        score_s=fmean(trial.lengths.score_s or 0.0 for trial in sync),
    )
    # The engine's time is linear in this cost.
    without_s = small.predicted_engine_s(found)
    per_second = small.predicted_engine_s(replace(found, admit_s=1.0)) - without_s
    found = replace(found, admit_s=max(0.0, (small.engine_s - without_s) / per_second))
    alone_s = [found.train_s(tokens, 0.0) for _, _, tokens in overlapping.train_steps[0]]
    slowdown = overlapping.train_steps[1].sum() / sum(alone_s)
    # Below 1 if the work of an engine costs the trainer less than pauses between its steps do.
    found = replace(found, trainer_slowdown=float(slowdown))
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


def fit_costs(causes: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Seconds per unit of each cause, by least squares; a cause whose cost would be negative costs
    nothing."""
    kept = list(range(causes.shape[1]))
    while (found := np.linalg.lstsq(causes[:, kept], seconds, rcond=None)[0]).min() < 0:
        del kept[int(found.argmin())]
    costs = np.zeros(causes.shape[1])
    costs[kept] = found
    return tuple(costs.tolist())


def start_costs(*begins: tuple[int, float]) -> tuple[float, float]:
    """Seconds of a start whatever the number of sequences, and per sequence, from two numbers of
    sequences that start together and the seconds that each takes."""
    (few, few_s), (many, many_s) = begins
    per_sequence_s = max(0.0, (many_s - few_s) / (many - few))
    return max(0.0, few_s - few * per_sequence_s), per_sequence_s


def turn_costs(turns: Sequence[TurnLife], *, num_engines: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What each turn consists of: its start, its decode steps, and the tokens that its engine
    sampled in them, one for each running sequence; and its seconds."""
    starts_s, ends_s, num_tokens = np.array([turn[:3] for turn in turns]).T
    seconds = np.maximum(1e-6, ends_s - starts_s)
    together_s = np.minimum.outer(ends_s, ends_s) - np.maximum.outer(starts_s, starts_s)
    # Two turns run together for at most all steps of the shorter one.
    steps = np.maximum(0.0, together_s) * np.minimum.outer(
        num_tokens / seconds, num_tokens / seconds
    )
    return np.stack([np.ones(len(turns)), num_tokens, steps.sum(1) / num_engines], 1), seconds


def trial_settings(given: Mapping[str, Any], *, device: str, folder: Path) -> dict[str, Any]:
    """The settings of the trial that the folder is named after."""
    config = load_config(given)
    size, minibatches = config.rollout.group_size, config.trainer.minibatches
    steps, groups, slots = _TRIALS[device][folder.name]
    own: dict[str, Any] = {
        **_ALWAYS,
        **(_ASYNC if folder.name == "overlapping" else _SYNC),
        "trainer.steps": steps,
        "trainer.groups_per_step": groups,
        "trainer.minibatches": min(minibatches, groups),
        "engine.max_sequences": max(1, round(slots * groups * size)),
        "run_dir": str(folder),
    }
    # anchored() leaves out what is None, which TOML does not have.
    return anchored(settings_table(given, overrides=own), folder=folder)


class _Trial:
    """A short run of the user's settings, in a process of its own."""

    def __init__(self, given: Mapping[str, Any], *, device: str, folder: Path) -> None:
        table = trial_settings(given, device=device, folder=folder)
        toml, log = folder.with_suffix(".toml"), folder.with_suffix(".log")
        toml.write_text(tomli_w.dumps(table))
        ended = train_process(["train", str(toml)], log=log)
        if ended.error is not None:
            raise RunFailed(f"A short run of the calibration failed: {ended.error}")
        self.peak_mib = ended.peak_mib
        if device == "cuda":
            self.peak_mib = ended.peak_gpu_mib or ended.peak_mib  # only nvidia-smi knows it
        self.config = load_config(table)
        self.lengths = read_lengths(str(folder), max_new_tokens=1)
        self._read(RunDir(folder), warm_up=_WARM_UP[device])

    def _read(self, run_dir: RunDir, *, warm_up: int) -> None:
        read = [read_lifecycle(run_dir, step) for step in steps_in(run_dir.lifecycle)]
        lives = [life for life in read if life is not None][warm_up:]
        groups = [group for life in lives for group in life.groups]
        self.turns = [turn for g in groups for turns in g.turns.values() for turn in turns]
        engine = self.config.engine
        sequences = self.config.trainer.groups_per_step * self.config.rollout.group_size
        self.num_first = min(sequences, engine.max_sequences * engine.num_local)
        self._first = {turn for life in lives for turn in _first_turns(life)[: self.num_first]}
        self._prompt_tokens = self.lengths.prompt_tokens * self.config.trainer.groups_per_step
        self.steps, self.step_s = len(lives), (lives[-1].end_s - lives[0].begin_s) / len(lives)
        ready = (max(g.ended_s or 0.0 for g in life.groups) for life in lives)
        takes = [life.begin_s - end_s for life, end_s in zip(lives, ready, strict=True)]
        self.take_s = max(0.0, fmean(takes))
        tokens = np.array([self._tokens(life) for life in lives])
        microbatches = np.ceil(tokens / self.config.trainer.microbatch_tokens)
        durations = np.array([life.end_s - life.begin_s for life in lives])
        self.train_steps = np.stack([np.ones_like(tokens), microbatches, tokens], 1), durations
        # Where generation and training alternate, a step's groups start after the step before it.
        begin_s = min(group.started_s for group in lives[0].groups)
        spans = [s for s in read_trace(run_dir.trace) if role_of(s.worker) == "engine" and s.busy]
        self.engine_s = _generated(spans, begin_s)
        starts = sorted(span.start_s for span in spans)
        ends = [life.end_s for life in lives[:-1]]
        gaps = [next((s - end for s in starts if s >= end), None) for end in ends]
        self.publish_s = fmean(gap for gap in gaps if gap is not None)

    def _tokens(self, life: StepLife) -> float:
        """The number of tokens that a step trained."""
        turns = (turn for group in life.groups for turns in group.turns.values() for turn in turns)
        return self._prompt_tokens + sum(turn.num_tokens for turn in turns)

    def turn_costs(self) -> tuple[np.ndarray, np.ndarray]:
        return turn_costs(self.turns, num_engines=self.config.engine.num_local)

    def begin_s(self, sequence_s: float) -> float:
        """The delay of turns that start when a step begins, before their first decode step."""
        causes, seconds = self.turn_costs()
        is_first = [turn in self._first for turn in self.turns]
        seconds -= sequence_s * causes[:, 2]
        return fit_costs(causes[is_first, :2], seconds[is_first])[0]

    def predicted_engine_s(self, found: Calibration) -> float:
        shape = ModelShape.read(self.config.model.path)
        predicted = predict(found, self.config, shape, self.lengths, steps=self.steps, warm_up=0)
        tokens = sum(turn.num_tokens for turn in self.turns)
        share = tokens / (predicted.tokens_per_s * predicted.ends_s[-1])
        return share * _generated(predicted.spans, 0.0)


def _first_turns(life: StepLife) -> list[TurnLife]:
    """The first turn of each episode, in the order in which engines get them."""
    groups = sorted(life.groups, key=lambda group: group.started_s)
    return [turns[0] for group in groups for _, turns in sorted(group.turns.items())]


def _generated(spans: Iterable[Span], begin_s: float) -> float:
    """Seconds in which engines sampled."""
    return sum(
        span.end_s - max(span.start_s, begin_s)
        for span in spans
        if span.name in ("generate", "drain") and span.end_s > begin_s
    )
