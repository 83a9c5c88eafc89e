"""The report of `millrace inspect --ledger`: the status of every task that was issued.

Promise: reads only, also while the run is alive.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from millrace.core.errors import ConfigError
from millrace.journal import Ledger, read_journal
from millrace.journal.ledger import TRAINED
from millrace.monitoring.run_dir import RunDir

STEPS_SHOWN = 10
RANGES_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport:
    ledger: Ledger
    closed: Mapping[str, list[int]]  # tasks by status and reason
    pending: Mapping[str, list[int]]  # open tasks by status

    def check(self) -> list[str]:
        """A sentence for each way in which the ledger does not add up."""
        listed = {number for numbers in self.closed.values() for number in numbers}
        missing = {*range(self.ledger.next_number)} - self.ledger.open - listed
        return self.ledger.check() + [f"Task {number} has no status." for number in sorted(missing)]

    def status(self, number: int) -> str:
        for status, numbers in {**self.closed, **self.pending}.items():
            if number in numbers:
                return status
        return "not issued"


def read_report(path: str | Path) -> LedgerReport:
    history = read_journal(RunDir(path).journal, list_closed=True)
    if history is None:
        raise ConfigError(
            f"{path} has no journal: it is not a run directory, or journal.max_bytes was 0."
        )
    ledger = history.ledger
    pending = {
        "training": sorted(ledger.training),
        "waiting": sorted(ledger.waiting),
        "running": sorted(ledger.running),
    }
    return LedgerReport(ledger=ledger, closed=history.closed, pending=pending)


def ledger_table(report: LedgerReport) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for label, count, text in _rows(report):
        table.add_row(label, f"{count}", text)
    return table


def _rows(report: LedgerReport) -> Iterator[tuple[str, int, str]]:
    ledger = report.ledger
    yield "issued", ledger.next_number, f"0-{ledger.next_number - 1}" if ledger.next_number else ""
    trained = _ranges(report.closed.get(TRAINED, []))
    # Versions begin at 0, and each step makes one.
    begun = [version for version, step in ledger.steps.items() if not step.is_applied]
    steps = f"by {min(begun, default=ledger.last_step + 1) - 1} steps"
    yield TRAINED, ledger.totals[TRAINED], f"{steps}: {trained}" if trained else steps
    for status, count in sorted(ledger.totals.items()):
        if status != TRAINED:
            yield status, count, _ranges(report.closed.get(status, []))
    for status, numbers in report.pending.items():
        yield status, len(numbers), _ranges(numbers)
    for version, step in list(ledger.steps.items())[-STEPS_SHOWN:]:
        replayed = f"; replayed {_ranges(step.replayed)}" if step.replayed else ""
        yield f"step {version}, {step.status}", len(step.numbers), _ranges(step.fresh) + replayed


def _ranges(numbers: Iterable[int]) -> str:
    """Such as "0-4, 7"; the newest ranges where there are many."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[-RANGES_SHOWN:]]
    return ", ".join([*(["..."] if len(ranges) > RANGES_SHOWN else []), *shown])
