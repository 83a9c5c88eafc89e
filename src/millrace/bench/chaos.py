"""`millrace bench chaos`: kill processes of a run at random, and check that nothing is lost.

A small model learns to sort digits, once undisturbed and once while engines, scorers, the trainer
and the controller are killed; the controller is restarted with --resume. Processes and signals are
real. The promises are checked from the run directory, the process table and observations from
outside; a broken promise makes the exit code 1.

A gap between two steps that is much longer than usual is attributed to the last kill before its
end, if that kill is recent: the effects of a kill show within the steps that were generated or
buffered by then. The time that is left over stays unexplained and measures the account's quality.
"""

import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from millrace.bench import bench_parser, write_result
from millrace.bench.faults import target_run
from millrace.bench.faults.injector import FaultInjector, Kill, TargetRunFailed
from millrace.core.files import has_owner
from millrace.journal.ledger import TRAINED
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.summary import read_report

MIN_STEPS, STEPS_PER_KILL = 200, 5  # with fewer steps, accuracy depends on chance
NUM_EXAMPLES = 9600  # for the model's warm start
NOISE_ERRORS = 3.0  # standard errors by which two accuracies may differ
MAX_REST_SHARE = 0.15  # share of the wall time that may stay unexplained
SHARED_MEMORY = Path("/dev/shm")
LONG_STEPS = 2.0  # a gap is long if it exceeds the usual time by this many steps
NEAR_STEPS = target_run.MAX_STALENESS + 3


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
    except TargetRunFailed as error:
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

    def __init__(self, folder: Path, **settings: Any) -> None:
        """`settings`: see TargetRun."""
        self.target = target_run.TargetRun(folder, **settings)
        self.checker = target_run.RunChecker(self.target.run_dir)
        self.injector = FaultInjector(self.target, self.checker)

    def run(self, num_kills: int = 0, *, step_s: float = 0.0) -> None:
        try:
            self.target.start()
            self.injector.inject(num_kills, step_s=step_s, seed=self.target.seed)
            self.checker.conclude()
            self.leftovers = check_leftovers(self.target)
        finally:
            self.target.close()
        self.summary = self.target.run_dir.read_summary()


def inject(folder: Path, *, num_kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Run once undisturbed and once with faults; returns the JSON result."""
    from millrace.demo.model import make_model  # only now: it imports torch

    make_model(folder / "model", seed, num_examples=NUM_EXAMPLES, num_digits=target_run.NUM_DIGITS)
    settings: dict[str, Any] = {"model": folder / "model", "steps": steps, "seed": seed}
    undisturbed = ObservedRun(folder / "undisturbed", **settings)
    undisturbed.run()
    times = RunTimes.of(undisturbed.checker)
    print(f"undisturbed: {steps} steps in {times.wall_s:.0f} s, {times.step_s:.2f} s each")
    disturbed = ObservedRun(folder / "disturbed", **settings)
    disturbed.run(num_kills, step_s=times.step_s)
    kills, summary = disturbed.injector.kills, disturbed.summary
    lost = account(disturbed.checker, kills, undisturbed=times)
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
        "undisturbed": asdict(times),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    what: str
    holds: bool
    found: str
    name: str = ""  # key of the count in the JSON result; "" = not in it
    count: int = 0  # violations


def check_kills(kills: Sequence[Kill], *, wanted: int) -> Promise:
    survivors = [kill.name for kill in kills if kill.gone_after_s is None]
    return Promise(
        what="every kill hit a live process, and the process was gone afterwards",
        holds=len(kills) == wanted and not survivors,
        found=f"{len(kills)} of {wanted} kills, {len(survivors)} survivors",
    )


def check_work(
    target: target_run.TargetRun, checker: target_run.RunChecker, *, summary: dict[str, Any]
) -> Iterator[Promise]:
    rows = [row["step"] for row in read_metrics(target.run_dir.metrics)]
    yield Promise(
        what="all steps are completed",
        holds=summary["steps"] == target.steps and rows == list(range(1, target.steps + 1)),
        found=f"{summary['steps']} steps, {len(rows)} rows",
    )
    report = read_report(target.run_dir.path)
    ledger, troubles = report.ledger, report.check()
    totals = [f"{count} {what}" for what, count in sorted(ledger.totals.items()) if count]
    yield Promise(
        what="no group is lost: each is trained, dropped with a reason, or pending",
        holds=not troubles,
        found=troubles[0] if troubles else f"{', '.join(totals)}, {len(ledger.open)} pending",
        name="groups_lost",
        count=len(troubles),
    )
    times = Counter(number for groups in checker.groups.values() for number in groups)
    twice = [number for number, count in times.items() if count > 1]
    yield Promise(
        what="no group is trained twice",
        holds=not twice
        and sorted(times) == report.closed[TRAINED]
        and len(times) == target.steps * target_run.GROUPS_PER_STEP,
        found=f"{len(times)} groups in {len(checker.groups)} steps, {len(twice)} in two of them",
        name="groups_trained_twice",
        count=len(twice),
    )
    yield Promise(
        what="a repeated step trains on the same groups",
        holds=not checker.contradictions,
        found=checker.contradictions[0]
        if checker.contradictions
        else f"{sum(not s.is_new for s in checker.steps_seen)} steps were repeated",
    )


def check_accuracy(undisturbed: float, disturbed: float) -> Promise:
    mean = (undisturbed + disturbed) / 2
    error = math.sqrt(2 * mean * (1 - mean) / target_run.HELD_OUT)
    return Promise(
        what=f"accuracies differ by at most {NOISE_ERRORS:g} standard errors of"
        f" {target_run.HELD_OUT} tasks",
        holds=abs(undisturbed - disturbed) <= NOISE_ERRORS * error,
        found=f"{disturbed:.3f}, undisturbed {undisturbed:.3f}, standard error {error:.3f}",
    )


def check_leftovers(target: target_run.TargetRun) -> Promise:
    left = [f"process {worker.name}" for worker in target_run.workers_of(*target.controllers)]
    left += [f"{path}" for path in target.temp.glob("millrace-*")]
    # Those with an owner are of other runs: all processes of this one have ended.
    left += [f"{path}" for path in SHARED_MEMORY.glob("millrace*") if not has_owner(path)]
    return Promise(
        what="no process, socket, temporary folder or shared memory is left",
        holds=not left,
        found=", ".join(left[:3]) if left else "none",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTimes:
    """How long the parts of an undisturbed run took."""

    wall_s: float
    start_s: float  # from the start to the first step
    step_s: float  # mean time from one step to the next
    end_s: float  # from the last step to the end

    @classmethod
    def of(cls, run: target_run.RunChecker) -> "RunTimes":
        first, last = run.steps_seen[0], run.steps_seen[-1]
        return cls(
            wall_s=run.ended_s - run.began_s,
            start_s=first.at_s - run.began_s,
            step_s=(last.at_s - first.at_s) / max(1, len(run.steps_seen) - 1),
            end_s=run.ended_s - last.at_s,
        )


@dataclass(kw_only=True, slots=True)
class TimeLoss:
    num_kills: int = 0
    seconds: float = 0.0
    redo_s: float = 0.0  # part of it, from the first repeated step to the first new one


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAccount:
    wall_s: float
    undisturbed_s: float
    by_role: dict[str, TimeLoss]
    rest_s: float  # time that neither the undisturbed run nor a kill explains


def account(
    run: target_run.RunChecker, kills: Sequence[Kill], *, undisturbed: RunTimes
) -> TimeAccount:
    by_role: dict[str, TimeLoss] = {}
    for kill in kills:
        by_role.setdefault(kill.role, TimeLoss()).num_kills += 1
    new = [seen for seen in run.steps_seen if seen.is_new]
    times = [run.began_s, *(seen.at_s for seen in new), run.ended_s]
    usual = [undisturbed.start_s, *([undisturbed.step_s] * (len(new) - 1)), undisturbed.end_s]
    steps = [0, *(seen.step for seen in new)]  # the last step before each gap
    for (begin_s, end_s), usual_s, step in zip(pairwise(times), usual, steps, strict=False):
        extra_s = end_s - begin_s - usual_s
        kill = next((kill for kill in reversed(kills) if kill.at_s < end_s), None)
        if extra_s <= LONG_STEPS * undisturbed.step_s or not kill or step - kill.step > NEAR_STEPS:
            continue
        again = [s.at_s for s in run.steps_seen if not s.is_new and begin_s <= s.at_s <= end_s]
        by_role[kill.role].seconds += extra_s
        by_role[kill.role].redo_s += end_s - again[0] if again else 0.0
    wall_s = run.ended_s - run.began_s
    return TimeAccount(
        wall_s=wall_s,
        undisturbed_s=undisturbed.wall_s,
        by_role=by_role,
        rest_s=wall_s - undisturbed.wall_s - sum(loss.seconds for loss in by_role.values()),
    )


def check_account(account: TimeAccount) -> Promise:
    return Promise(
        what=f"at most {MAX_REST_SHARE:.0%} of the time is unexplained",
        holds=abs(account.rest_s) <= MAX_REST_SHARE * account.wall_s,
        found=f"{account.rest_s:+.1f} s of {account.wall_s:.0f} s are unexplained",
    )
