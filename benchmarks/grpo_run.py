"""Workload, measurement and comparison of the GRPO runs of grpo_on_gpu.py."""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import forced_lengths
import sums
from forced_lengths import long_tailed_lengths

from millrace.compare.runs import used_gpu_mib

WARM_UP_STEPS = 10  # excluded from samples per second; half of a run with fewer than 20 steps
WINDOW = 5  # steps over which the last rewards are averaged
NUM_TASKS = 8192
PROMPT_TOKENS = 128  # longer than any question


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training job, which each side runs."""

    model: str
    lengths: sums.Lengths | Literal["forced"]
    prompts: int  # per step
    group: int  # completions of each prompt
    max_new_tokens: int
    steps: int
    learning_rate: float
    seed: int
    device: str  # "cpu" or "cuda"
    dtype: str  # of generation and of the trainer's compute; master weights are float32 everywhere
    lora: int | None = None  # rank of an adapter of all layers; None = all weights are trained

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.group

    @property
    def forced(self) -> list[int]:
        """The number of tokens of each completion of a step, if the lengths are forced."""
        return long_tailed_lengths(self.prompts, self.group, longest=self.max_new_tokens)

    @property
    def reward(self) -> Callable[..., list[float]]:
        return forced_lengths.vowel_share if self.lengths == "forced" else sums.exact_sum

    def tasks(self) -> list[dict[str, Any]]:
        if self.lengths == "forced":
            return forced_lengths.make_tasks(NUM_TASKS, lengths=self.forced, group=self.group)
        return sums.make_tasks(NUM_TASKS, seed=self.seed, lengths=self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurements of one side; lists have one entry per step."""

    name: str
    samples_per_step: int
    times_s: list[float]  # end of each step
    rewards: list[float]
    mean_lengths: list[float]  # completion tokens
    mismatches: list[float]  # mean |trainer - engine logprob|; empty if it was not computed
    ended_share: float | None  # share of completions that ended before the limit
    peak_gpu_bytes: int | None  # of all processes on the device; None if unknown
    notes: dict[str, Any]

    @property
    def samples_per_s(self) -> float:
        warm_up = min(WARM_UP_STEPS, len(self.times_s) // 2)
        seconds = self.times_s[-1] - self.times_s[warm_up - 1]
        return self.samples_per_step * (len(self.times_s) - warm_up) / seconds

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(samples seen, mean reward of the step that ended there)."""
        return [(n * self.samples_per_step, r) for n, r in enumerate(self.rewards, start=1)]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")


def load_measurement(path: Path) -> Measurement:
    return Measurement(**json.loads(path.read_text()))


def compare(
    ours: Measurement, peer: Measurement | None, *, recorded: float | None = None
) -> list[dict[str, Any]]:
    """One row per measure. `recorded` is the peer's samples/s if the peer itself was not run."""
    # Rewards are compared over the same number of samples.
    steps = len(ours.rewards)
    if peer is not None:
        seen = min(side.samples_per_step * len(side.rewards) for side in (ours, peer))
        steps = seen // ours.samples_per_step
    sides = (ours, peer)
    rates = (ours.samples_per_s, peer.samples_per_s if peer else recorded)
    return [
        _row("samples_per_s", *rates, **ours.notes),
        _row("completion_tokens_mean", *(_mean(s.mean_lengths) if s else None for s in sides)),
        _row("ended_share", *(s.ended_share if s else None for s in sides)),
        _row(
            f"reward of the first {steps * ours.samples_per_step} samples",
            *(_mean(_first(s, steps, like=ours)) if s else None for s in sides),
            curve=ours.curve,
            peer_curve=peer.curve if peer else None,
        ),
        _row(
            f"reward of the last {WINDOW} steps among them",
            *(_mean(_first(s, steps, like=ours)[-WINDOW:]) if s else None for s in sides),
        ),
        _row(
            "logprob_mismatch",
            *(_mean(s.mismatches) if s else None for s in sides),
            per_step=ours.mismatches,
        ),
        _row("peak_gpu_bytes", *(s.peak_gpu_bytes if s else None for s in sides)),
    ]


def _first(side: Measurement, steps: int, *, like: Measurement) -> list[float]:
    """Rewards of as many samples as `like` has in its first `steps` steps."""
    return side.rewards[: steps * like.samples_per_step // side.samples_per_step]


def _row(measure: str, ours: float | None, peer: float | None, **details: Any) -> dict[str, Any]:
    ratio = ours / peer if ours is not None and peer else None
    return {"measure": measure, "ours": ours, "peer": peer, "ratio": ratio, **details}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@contextlib.contextmanager
def sampled_gpu_memory(device: str, *, period_s: float = 1.0) -> Iterator[list[int]]:
    """A list that grows by the bytes in use, as nvidia-smi reports them every `period_s`."""
    used: list[int] = []
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        yield used
        return
    done = threading.Event()

    def sample() -> None:
        while not done.wait(period_s):
            used.append(int(used_gpu_mib() * 2**20))

    thread = threading.Thread(target=sample, name="gpu-memory")
    thread.start()
    try:
        yield used
    finally:
        done.set()
        thread.join()
