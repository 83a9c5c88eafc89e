"""Promises that a run must keep in spite of faults, checked from what it has written."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.bench.faults.checker import RunChecker
from millrace.bench.faults.injector import Kill
from millrace.bench.faults.processes import workers_of
from millrace.bench.faults.target_run import GROUPS_PER_STEP, HELD_OUT, TargetRun
from millrace.bench.faults.time_lost import TimeAccount
from millrace.journal.ledger import TRAINED
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.ledger import read_report

NOISE_ERRORS = 3.0  # standard errors by which two accuracies may differ
MAX_REST_SHARE = 0.15  # share of the wall time that may stay unexplained
SHARED_MEMORY = Path("/dev/shm")


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
    target: TargetRun, checker: RunChecker, *, summary: dict[str, Any]
) -> Iterator[Promise]:
    rows = [row["step"] for row in read_metrics(target.run_dir.metrics)]
    yield Promise(
        what="all steps are completed",
        holds=summary["steps"] == target.steps and rows == list(range(1, target.steps + 1)),
        found=f"{summary['steps']} steps, {len(rows)} rows",
    )
    report = read_report(target.run_dir.path)
    ledger, troubles = report.ledger, report.check()
    yield Promise(
        what="no group is lost: each is trained, dropped with a reason, or pending",
        holds=not troubles,
        found=troubles[0] if troubles else _totals(ledger.totals, num_open=len(ledger.open)),
        name="groups_lost",
        count=len(troubles),
    )
    times = Counter(number for groups in checker.groups.values() for number in groups)
    twice = [number for number, count in times.items() if count > 1]
    yield Promise(
        what="no group is trained twice",
        holds=not twice
        and sorted(times) == report.closed[TRAINED]
        and len(times) == target.steps * GROUPS_PER_STEP,
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
    error = math.sqrt(2 * mean * (1 - mean) / HELD_OUT)
    return Promise(
        what=f"accuracies differ by at most {NOISE_ERRORS:g} standard errors of {HELD_OUT} tasks",
        holds=abs(undisturbed - disturbed) <= NOISE_ERRORS * error,
        found=f"{disturbed:.3f}, undisturbed {undisturbed:.3f}, standard error {error:.3f}",
    )


def check_leftovers(target: TargetRun) -> Promise:
    left = [f"process {worker.name}" for worker in workers_of(*target.controllers)]
    left += [f"{path}" for path in target.temp.glob("millrace-*")]
    left += [f"{path}" for path in SHARED_MEMORY.glob("millrace*")]
    return Promise(
        what="no process, socket, temporary folder or shared memory is left",
        holds=not left,
        found=", ".join(left[:3]) if left else "none",
    )


def check_account(account: TimeAccount) -> Promise:
    return Promise(
        what=f"at most {MAX_REST_SHARE:.0%} of the time is unexplained",
        holds=abs(account.rest_s) <= MAX_REST_SHARE * account.wall_s,
        found=f"{account.rest_s:+.1f} s of {account.wall_s:.0f} s are unexplained",
    )


def _totals(totals: Counter[str], *, num_open: int) -> str:
    parts = [f"{count} {what}" for what, count in sorted(totals.items()) if count]
    return ", ".join([*parts, f"{num_open} pending"])
