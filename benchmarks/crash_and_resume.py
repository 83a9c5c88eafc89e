"""The same training, killed at random and resumed, with Millrace and with TRL's GRPOTrainer.

    pip install trl datasets psutil
    python benchmarks/crash_and_resume.py --json crash_and_resume.json

Both sides train the demo's model on the same tasks, write a checkpoint every EVERY steps, and run
once undisturbed and once with kills. A kill ends all processes of the training at once (SIGKILL),
as when a machine is lost, at a random moment between the first and the 2 * EVERY-th step after a
start. Both are killed at the same numbers of steps after each start. Each is resumed as its
documentation says: `resume_from_checkpoint=True`, and `resume=True`.

Of each side: prompts that were handed out and never trained (skipped), prompts of two steps of the
final model (repeated), steps that were computed again (redone), and seconds lost per kill: the
difference of the two runs' wall times, divided by the kills.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from trl_runs import grpo_settings
from versus_trl import GROUP_SIZE, SEED, WORKLOADS, digits_right, make_model, our_settings

from millrace.demo.task import make_tasks

GROUPS = 16  # prompts per step
EVERY = 5  # steps from one checkpoint to the next
WORKLOAD = WORKLOADS["short"]
POLL_S = 0.02


@dataclass(kw_only=True, slots=True)
class Training:
    """One training of one side, from its first start to its end."""

    side: str
    folder: Path
    steps: int
    wall_s: float = 0.0
    num_kills: int = 0
    first_step_s: list[float] = field(default_factory=list[float])  # after each start

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each step that was completed, also for those that a kill undid."""
        return _rows(self.folder / "steps.jsonl")

    def run(self, kills: Sequence[float]) -> None:
        """Run to the end; `kills` are steps after a start, with a fraction of the next one."""
        self.folder.mkdir()
        begin_s = time.monotonic()
        for wait in kills:
            process = self._start()
            killed = self._wait(process, wait)
            self._kill(process)
            if not killed:
                raise RuntimeError(f"{self.side} ended before it was killed; see {self.folder}/log")
            self.num_kills += 1
        process = self._start()
        self._wait(process, float("inf"))
        if process.wait():
            raise RuntimeError(f"{self.side} failed; see {self.folder}/log")
        self.wall_s = time.monotonic() - begin_s

    def _start(self) -> psutil.Popen:
        command = [sys.executable, __file__, "--side", self.side, "--keep", str(self.folder)]
        command += ["--steps", str(self.steps), *(["--resume"] if self.num_kills else [])]
        with (self.folder / "log").open("a") as log:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            return psutil.Popen(command, env=environment, stdout=log, stderr=log)

    def _wait(self, process: psutil.Popen, num_steps: float) -> bool:
        """Wait until that many steps are done; False = the process ended before."""
        begin_s = time.monotonic()
        before = len(self.rows)
        times_s: list[float] = []
        while process.poll() is None:
            now_s = time.monotonic()
            times_s += [now_s] * (len(self.rows) - before - len(times_s))
            if times_s and len(self.first_step_s) <= self.num_kills:
                self.first_step_s.append(now_s - begin_s)
            if len(times_s) > max(1, num_steps):
                step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
                time.sleep(step_s * (num_steps % 1))
                return True
            time.sleep(POLL_S)
        return False

    def _kill(self, process: psutil.Popen) -> None:
        family = [*process.children(recursive=True), process]
        for each in family:
            each.kill()
        psutil.wait_procs(family)

    def result(self, undisturbed: "Training") -> dict[str, Any]:
        final = {row["step"]: row for row in self.rows}
        assert sorted(final) == [*range(1, self.steps + 1)], "each step is in the final model"
        times = Counter(number for row in final.values() for number in row["prompts"])
        handed_out = _rows(self.folder / "handed_out.jsonl")
        numbers = {number for row in handed_out for number in row["numbers"]}
        pending = set(handed_out[-1].get("pending", ()))
        return {
            "side": self.side,
            "kills": self.num_kills,
            "steps": self.steps,
            "prompts_trained": len(times),
            "prompts_skipped": len(numbers - times.keys() - pending),
            "prompts_repeated": sum(count > 1 for count in times.values()),
            "steps_redone": len(self.rows) - self.steps,
            "undisturbed_s": undisturbed.wall_s,
            "wall_s": self.wall_s,
            "lost_s_per_kill": (self.wall_s - undisturbed.wall_s) / max(1, self.num_kills),
            "start_to_first_step_s": sorted(self.first_step_s)[len(self.first_step_s) // 2],
        }


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # A kill may leave the beginning of a row.
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("\n" * (file.tell() > 0 and not path.read_text().endswith("\n")))
        file.write(json.dumps(row) + "\n")


def train_ours(folder: Path, *, steps: int, resume: bool) -> None:
    import millrace as mr
    from millrace.monitoring.report.summary import read_report

    class Recorder(mr.Callback):
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def on_group(self, group: Any) -> None:
            self.numbers.append(group.number)

        def on_step(self, metrics: Any) -> None:
            _append(folder / "steps.jsonl", {"step": metrics["step"], "prompts": self.numbers})
            self.numbers = []

    mr.train(
        model=str(folder.parent / "model"),
        run_dir=str(folder / "run"),
        **our_settings(WORKLOAD, groups=GROUPS, steps=steps, checkpoint_every=EVERY),
        callbacks=[Recorder()],
        resume=resume,
    )
    report = read_report(folder / "run")
    pending = [number for numbers in report.pending.values() for number in numbers]
    row = {"numbers": [*range(report.ledger.next_number)], "pending": pending}
    _append(folder / "handed_out.jsonl", row)


def train_peer(folder: Path, *, steps: int, resume: bool) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    numbers: list[int] = []

    class RecordedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            numbers[:] = dict.fromkeys(row["number"] for row in inputs)
            _append(folder / "handed_out.jsonl", {"numbers": numbers})
            return super()._generate_and_score_completions(inputs)

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _append(folder / "steps.jsonl", {"step": state.global_step, "prompts": numbers})

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    settings = grpo_settings(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=WORKLOAD.max_new_tokens,
        learning_rate=WORKLOAD.learning_rate,
        seed=SEED,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=2,
    )
    tasks = [{**task, "number": n} for n, task in enumerate(make_tasks(8192, seed=SEED))]
    trainer = RecordedTrainer(
        model=str(folder.parent / "model"),
        args=settings,
        reward_funcs=digits_right,
        train_dataset=Dataset.from_list(tasks),
        callbacks=[Recorder()],
    )
    has_checkpoint = any((folder / "trl").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resume and has_checkpoint)


SIDES = {"ours": train_ours, "peer": train_peer}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="number (10)")
    parser.add_argument("--steps", type=int, default=80, help="of each training (80)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    parser.add_argument("--keep", metavar="DIR", help="keep models and measurements here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](Path(args.keep), steps=args.steps, resume=args.resume)
        return 0
    with tempfile.TemporaryDirectory(prefix="crash-and-resume-") as scratch:
        folder = Path(args.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = compare(folder, num_kills=args.kills, steps=args.steps)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def compare(folder: Path, *, num_kills: int, steps: int) -> list[dict[str, Any]]:
    make_model(folder / "model", WORKLOAD)
    draw = random.Random(SEED)
    # With a kill after fewer steps than a checkpoint needs, the training would not move.
    kills = [draw.uniform(1, 2 * EVERY) for _ in range(num_kills)]
    rows = []
    for side in SIDES:
        undisturbed, disturbed = (
            Training(side=side, folder=folder / f"{side}-{name}", steps=steps)
            for name in ("undisturbed", "killed")
        )
        undisturbed.run([])
        disturbed.run(kills)
        rows.append(disturbed.result(undisturbed))
        print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
