"""`millrace bench chaos`: kill processes of a run at random, and check that nothing is lost.

A small model learns to sort digits, once undisturbed and once while engines, scorers, the trainer
and the controller are killed; the controller is restarted with --resume. Processes and signals are
real. The promises are checked from the run directory, the process table and observations from
outside; a broken promise makes the exit code 1.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millrace.bench import bench_parser, write_result
from millrace.bench.faults.injector import FaultInjector, Stuck
from millrace.bench.faults.promises import (
    Pace,
    account,
    check_account,
    check_accuracy,
    check_kills,
    check_leftovers,
    check_work,
)
from millrace.bench.faults.target_run import NUM_DIGITS, RunChecker, TargetRun

MIN_STEPS, STEPS_PER_KILL = 200, 5  # with fewer steps, accuracy depends on chance
NUM_EXAMPLES = 9600  # for the model's warm start


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("chaos")
    parser.add_argument("--kills", type=int, default=20, help="number (20); 200 is a soak test")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the run and the kills")
    parser.add_argument("--steps", type=int, help="of the run (5 per kill, at least 200)")
    parser.add_argument("--keep", metavar="DIR", help="keep both run directories in this folder")
    args = parser.parse_args(argv)
    steps = args.steps or max(MIN_STEPS, STEPS_PER_KILL * args.kills)
    folder = Path(args.keep or tempfile.mkdtemp(prefix="millrace-bench-"))
    try:
        result = inject(folder, num_kills=args.kills, steps=steps, seed=args.seed)
    except Stuck as error:
        print(f"{error}\nThe run directories are in {folder}.", file=sys.stderr)
        return 1
    print(_table(result))
    write_result(result, args.json)
    if all(promise["holds"] for promise in result["promises"]):
        if not args.keep:
            shutil.rmtree(folder)
        return 0
    print(f"The run directories are in {folder}.", file=sys.stderr)
    return 1


class ObservedRun:
    """A target run from start to end, with a checker and a fault injector."""

    def __init__(self, folder: Path, *, model: Path, steps: int, seed: int) -> None:
        self._seed = seed
        self.target = TargetRun(folder, model=model, steps=steps, seed=seed)
        self.checker = RunChecker(self.target.run_dir)
        self.injector = FaultInjector(self.target, self.checker)

    def run(self, num_kills: int = 0, *, step_s: float = 0.0) -> None:
        try:
            self.target.start()
            self.injector.inject(num_kills, step_s=step_s, seed=self._seed)
            self.checker.conclude()
            self.leftovers = check_leftovers(self.target)
        finally:
            self.target.close()
        self.summary = json.loads(self.target.run_dir.summary.read_text())


def inject(folder: Path, *, num_kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Run once undisturbed and once with faults; returns the JSON result."""
    from millrace.demo.model import make_model  # only now: it imports torch

    make_model(folder / "model", seed, num_examples=NUM_EXAMPLES, num_digits=NUM_DIGITS)
    settings: dict[str, Any] = {"model": folder / "model", "steps": steps, "seed": seed}
    undisturbed = ObservedRun(folder / "undisturbed", **settings)
    undisturbed.run()
    pace = Pace.of(undisturbed.checker)
    print(f"undisturbed: {steps} steps in {pace.wall_s:.0f} s, {pace.step_s:.2f} s each")
    disturbed = ObservedRun(folder / "disturbed", **settings)
    disturbed.run(num_kills, step_s=pace.step_s)
    kills, summary = disturbed.injector.kills, disturbed.summary
    lost = account(disturbed.checker, kills, pace=pace)
    promises = [
        check_kills(kills, wanted=num_kills),
        *check_work(disturbed.target, disturbed.checker, summary=summary),
        check_accuracy(undisturbed.summary["accuracy_after"], summary["accuracy_after"]),
        disturbed.leftovers,
        check_account(lost),
    ]
    return {
        "kills": len(kills),
        **{promise.name: promise.count for promise in promises if promise.name},
        "steps_completed": summary["steps"],
        "accuracy_after": summary["accuracy_after"],
        "steps": steps,
        "seed": seed,
        "injected": [asdict(kill) for kill in kills],
        "undisturbed": asdict(pace),
        "account": asdict(lost),
        "summaries": {"undisturbed": undisturbed.summary, "disturbed": summary},
        "promises": [asdict(promise) for promise in promises],
    }


def _table(result: dict[str, Any]) -> str:
    lost = result["account"]
    lines = [f"\n{'seconds':<24}{'kills':>8}{'lost':>10}{'per kill':>10}{'redone':>10}"]
    lines.append(f"{'undisturbed':<24}{'':>8}{lost['undisturbed_s']:10.1f}")
    for role, loss in sorted(lost["by_role"].items()):
        num_kills, seconds = loss["num_kills"], loss["seconds"]
        per_kill_s, redo_s = seconds / num_kills, loss["redo_s"]
        lines.append(f"{role:<24}{num_kills:8}{seconds:10.1f}{per_kill_s:10.1f}{redo_s:10.1f}")
    lines.append(f"{'unexplained':<24}{'':>8}{lost['rest_s']:10.1f}")
    lines.append(f"{'all':<24}{result['kills']:8}{lost['wall_s']:10.1f}\n")
    for promise in result["promises"]:
        lines.append(f"{'holds ' if promise['holds'] else 'BROKEN'}  {promise['what']}")
        lines.append(f"        {promise['found']}")
    return "\n".join(lines)
