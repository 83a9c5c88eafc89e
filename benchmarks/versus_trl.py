"""Millrace against TRL's GRPOTrainer with transformers generation: same model, tasks, batch, cores.

    pip install trl datasets
    python benchmarks/versus_trl.py --json versus_trl.json

Both workloads use the demo's task and model. In "long_tail", a warm start has taught the model to
add dots after its answer, or sometimes a long row of dashes. Most completions are short and a few
reach the limit, as with reasoning models. In "short", completions have 4 to 8 tokens.

Both sides take the same number of prompts and completions per step, sample at temperature 1 up to
the same limit, and minimise the same clipped, token-averaged objective in float32. TRL generates
the whole batch at once, trains with the batch size that is fastest for it, without gradient
checkpointing, and has all cores all the time. Millrace divides them between engine and trainer.

Rows: samples per second after the first steps, and seconds from the start of the process until the
reward, averaged over WINDOW steps, first reaches TRL's final reward.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trl_runs import BETAS, grpo_settings, step_recorder

from millrace.demo.task import make_tasks

GROUPS, GROUP_SIZE = 32, 8  # prompts per step, completions of each
SEED = 0
BATCH_SIZE = 32  # of the warm start
PROCESS_START_S = time.monotonic()
WARM_UP_STEPS = 3  # left out of samples per second
WINDOW = 5  # steps over which rewards are averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuWorkload:
    max_new_tokens: int
    peer_steps: int
    our_steps: int
    learning_rate: float
    peer_sequences: int  # per forward and backward pass of TRL: the fastest number
    rambling: bool = False


WORKLOADS = {
    "long_tail": CpuWorkload(
        max_new_tokens=256,
        peer_steps=20,
        our_steps=60,
        learning_rate=1e-4,
        peer_sequences=32,
        rambling=True,
    ),
    "short": CpuWorkload(
        max_new_tokens=10, peer_steps=40, our_steps=60, learning_rate=1.5e-4, peer_sequences=256
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SideMeasurement:
    """Measurements of one side. Lists have one entry per step; times count from process start."""

    times_s: list[float]
    rewards: list[float]
    mean_lengths: list[float]  # completion tokens
    cpu_s: float  # of the process and its children
    notes: dict[str, float]

    @property
    def samples_per_s(self) -> float:
        first, last = self.times_s[WARM_UP_STEPS - 1], self.times_s[-1]
        return GROUPS * GROUP_SIZE * (len(self.times_s) - WARM_UP_STEPS) / (last - first)

    def seconds_to(self, reward: float) -> float | None:
        for end in range(WINDOW, len(self.rewards) + 1):
            if sum(self.rewards[end - WINDOW : end]) / WINDOW >= reward:
                return self.times_s[end - 1]
        return None


def digits_right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for exactly the correct digits, with any number of dots or dashes after them."""
    return [
        float(text.rstrip(".-") == right) for text, right in zip(completions, answer, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", metavar="DIR", help="keep models and measurements here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.workload or list(WORKLOADS)
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as scratch:
        folder = Path(args.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if args.side:
            _measure(args.side, names[0], folder=folder)
            return 0
        rows = [row for name in names for row in compare(name, folder=folder)]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def compare(name: str, *, folder: Path) -> list[dict[str, Any]]:
    """Measure both sides of one workload, one after the other, each in its own process."""
    if not (folder / name / "config.json").exists():
        make_model(folder / name, WORKLOADS[name])
    peer, ours = (_measure_in_process(side, name, folder=folder) for side in ("peer", "ours"))
    reward = sum(peer.rewards[-WINDOW:]) / WINDOW
    reached_s, peer_reached_s = ours.seconds_to(reward), peer.seconds_to(reward)
    assert peer_reached_s is not None, "its last WINDOW steps have this reward"
    rows = [
        {
            "workload": name,
            "measure": "samples_per_s",
            "ours": ours.samples_per_s,
            "peer": peer.samples_per_s,
            "ratio": ours.samples_per_s / peer.samples_per_s,
        },
        {
            "workload": name,
            "measure": f"seconds to reward {reward:.3f}",
            "ours": reached_s,
            "peer": peer_reached_s,
            "ratio": None if reached_s is None else peer_reached_s / reached_s,
        },
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    print(json.dumps({"workload": name, "ours": _notes(ours), "peer": _notes(peer)}), flush=True)
    return rows


def _notes(side: SideMeasurement) -> dict[str, float]:
    length = sum(side.mean_lengths) / len(side.mean_lengths)
    return {"completion_tokens_mean": length, "cpu_s": side.cpu_s, **side.notes}


def make_model(directory: Path, workload: CpuWorkload) -> None:
    """The demo's model after the demo's warm start, on rambling examples if the workload asks."""
    from millrace.demo.model import (
        NUM_EXAMPLES,
        PIECES,
        build_model,
        build_tokenizer,
        careless_examples,
        warm_start,
    )

    print(f"making {directory.name} model ...", flush=True)
    examples = careless_examples(NUM_EXAMPLES, seed=SEED)
    if workload.rambling:
        examples = _rambling(examples, workload)
    tokenizer = build_tokenizer((*PIECES, ".", "-"))
    model = build_model(tokenizer, seed=SEED)
    warm_start(model, tokenizer, examples=examples, batch_size=BATCH_SIZE)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _rambling(examples: Sequence[tuple[str, str]], workload: CpuWorkload) -> list[tuple[str, str]]:
    """The examples with dots or dashes after each answer, in batches of similar lengths."""
    rng = random.Random(SEED)
    longest = workload.max_new_tokens - 8  # room for the answer and its end
    rambling = []
    for prompt, answer in examples:
        mark, mean = ("-", 120) if rng.random() < 0.15 else (".", 16)
        rambling.append((prompt, answer + mark * min(int(rng.expovariate(1 / mean)), longest)))
    rambling.sort(key=lambda example: len(example[1]))
    # One long example would pad all others in its batch.
    starts = list(range(0, len(rambling), BATCH_SIZE))
    rng.shuffle(starts)
    return [example for start in starts for example in rambling[start : start + BATCH_SIZE]]


def _measure_in_process(side: str, name: str, *, folder: Path) -> SideMeasurement:
    print(f"{name}: running {side} ...", flush=True)
    command = [sys.executable, __file__, "--side", side, "--workload", name, "--keep", str(folder)]
    result = folder / f"{name}-{side}.json"
    with (folder / f"{name}-{side}.log").open("w") as log:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # everything needed is in the folder
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    return SideMeasurement(**json.loads(result.read_text()))


def _measure(side: str, name: str, *, folder: Path) -> None:
    measured = SIDES[side](folder / name, WORKLOADS[name])
    (folder / f"{name}-{side}.json").write_text(json.dumps(asdict(measured)))


def _since_start_s() -> float:
    return time.monotonic() - PROCESS_START_S


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def our_settings(
    workload: CpuWorkload, *, groups: int, steps: int, checkpoint_every: int = 0
) -> dict[str, Any]:
    """What mr.train() needs apart from the model and a folder."""
    return {
        "seed": SEED,
        "tasks": make_tasks(8192, seed=SEED),
        "scorers": digits_right,
        "sampling": {"max_new_tokens": workload.max_new_tokens},
        "rollout": {"group_size": GROUP_SIZE, "max_running_groups": 2 * groups},
        "buffer": {"capacity": 2 * groups, "max_staleness": 2},
        "engine": {"max_sequences": 128},
        "trainer": {"steps": steps, "groups_per_step": groups, "microbatch_tokens": 2048},
        "optimizer": {"learning_rate": workload.learning_rate, "betas": BETAS},
        "scoring": {"workers": 1},
        "checkpoint": {"every_steps": checkpoint_every},
        "monitoring": {"progress": "off", "samples_per_step": 0},
    }


def measure_ours(model: Path, workload: CpuWorkload) -> SideMeasurement:
    import millrace as mr
    from millrace.monitoring.files.metrics import read_metrics

    begin_s = _since_start_s()
    result = mr.train(
        model=str(model),
        run_dir=tempfile.mkdtemp(dir=model.parent, prefix=f"{model.name}-run-"),
        **our_settings(workload, groups=GROUPS, steps=workload.our_steps),
    )
    # The run's clock starts after its settings, tasks and tokenizer are checked.
    offset_s = _since_start_s() - result.seconds
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    return SideMeasurement(
        times_s=[offset_s + row["time_s"] for row in rows],
        rewards=[row["reward/mean"] for row in rows],
        mean_lengths=[row["completion_length/mean"] for row in rows],
        cpu_s=_cpu_s(),
        notes={
            "checking_s": offset_s - begin_s,
            "engine_busy": sum(row["busy/engine"] for row in rows) / len(rows),
            "trainer_busy": sum(row["busy/trainer"] for row in rows) / len(rows),
        },
    )


def measure_peer(model: Path, workload: CpuWorkload) -> SideMeasurement:
    import torch
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    settings = grpo_settings(
        output_dir=str(model.with_name(f"{model.name}-trl")),
        use_cpu=True,
        bf16=False,
        max_steps=workload.peer_steps,
        per_device_train_batch_size=workload.peer_sequences,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // workload.peer_sequences,
        num_generations=GROUP_SIZE,
        max_completion_length=workload.max_new_tokens,
        learning_rate=workload.learning_rate,
        seed=SEED,
    )
    recorder = step_recorder()
    generating_s = [0.0]

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            generated = super()._generate_single_turn(*args, **kwargs)
            generating_s[0] += time.monotonic() - begin_s
            return generated

    trainer = TimedTrainer(
        model=str(model),
        args=settings,
        reward_funcs=digits_right,
        train_dataset=Dataset.from_list(make_tasks(8192, seed=SEED)),
        callbacks=[recorder],
    )
    begin_s = time.monotonic()
    trainer.train()
    return SideMeasurement(
        times_s=[time_s - PROCESS_START_S for time_s in recorder.times_s],
        rewards=[row["reward"] for row in recorder.logs],
        mean_lengths=[row["completions/mean_length"] for row in recorder.logs],
        cpu_s=_cpu_s(),
        notes={"generating_share": generating_s[0] / (time.monotonic() - begin_s)},
    )


SIDES: dict[str, Callable[[Path, CpuWorkload], SideMeasurement]] = {
    "ours": measure_ours,
    "peer": measure_peer,
}

if __name__ == "__main__":
    sys.exit(main())
