"""What `millrace inspect --ledger` says: what became of every number that was issued.

Promise: reads only, also while the run goes on.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from millrace.core.errors import ConfigError
from millrace.journal import Ledger, TaskStatusFile, read_journal
from millrace.journal.ledger import EARLIER, TRAINED
from millrace.monitoring.run_dir import RunDir

STEPS_SHOWN = 10
RANGES_SHOWN = 20
IN_A_STEP, WAITING, PLAYING = "in a step", "waiting", "to be played"  # pending, that is


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport:
    """Of every number that was issued."""

    ledger: Ledger
    closed: Mapping[str, list[int]]  # by what became of them
    pending: Mapping[str, list[int]]  # by where they are

    def check(self) -> list[str]:
        """A sentence for each way in which it does not add up."""
        counted = {what: n for what, n in self.ledger.totals.items() if what != EARLIER}
        listed = {what: len(numbers) for what, numbers in self.closed.items()}
        apart = [what for what in {**counted, **listed} if counted.get(what) != listed.get(what)]
        return self.ledger.check() + [
            f"{counted.get(what, 0)} numbers count as {what!r}, and {listed.get(what, 0)} are"
            " written down one by one."
            for what in apart
        ]

    def fate(self, number: int) -> str:
        """What became of it, in a few words."""
        found = [what for what, numbers in self.closed.items() if number in numbers]
        found += [f"pending: {where}" for where, n in self.pending.items() if number in n]
        if not found:
            return EARLIER if number < self.ledger.next_number else "not issued"
        return found[0]


def read_account(path: str | Path) -> LedgerReport:
    folder = RunDir(path).journal
    past = read_journal(folder)
    if past is None:
        raise ConfigError(
            f"{path} holds no journal: it is no run directory, or journal.enabled was false."
        )
    ledger = past.ledger
    pending = {
        IN_A_STEP: sorted(ledger.in_steps),
        WAITING: sorted(ledger.waiting),
        PLAYING: sorted(ledger.playing),
    }
    return LedgerReport(ledger=ledger, closed=TaskStatusFile(folder).read(ledger), pending=pending)


def ledger_table(account: LedgerReport) -> Table:
    """For the terminal: how many numbers, what became of them, and which."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for label, count, text in _rows(account):
        table.add_row(label, f"{count}", text)
    return table


def _rows(account: LedgerReport) -> Iterator[tuple[str, int, str]]:
    ledger = account.ledger
    yield "issued", ledger.next_number, f"0-{ledger.next_number - 1}" if ledger.next_number else ""
    trained = _ranges(account.closed.get(TRAINED, []))
    steps = f"by {_applied(ledger)} steps"
    yield TRAINED, ledger.totals[TRAINED], f"{steps}: {trained}" if trained else steps
    for what, count in sorted(ledger.totals.items()):
        if what != TRAINED:
            yield what, count, _ranges(account.closed.get(what, []))
    for where, numbers in account.pending.items():
        yield f"pending: {where}", len(numbers), _ranges(numbers)
    for version, step in list(ledger.steps.items())[-STEPS_SHOWN:]:
        state = "" if step.is_applied else ", begun"
        again = step.begun.replayed
        replayed = f"; again {_ranges(again)}" if again else ""
        yield f"step {version}{state}", len(step.numbers), _ranges(step.begun.fresh) + replayed


def _applied(ledger: Ledger) -> int:
    """Versions begin at 0, and each step makes one."""
    is_begun = [version for version, step in ledger.steps.items() if not step.is_applied]
    return min(is_begun, default=ledger.last_begun + 1) - 1


def _ranges(numbers: Iterable[int]) -> str:
    """Such as "0-4, 7"; of many, the newest."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[-RANGES_SHOWN:]]
    return ", ".join([*(["..."] if len(ranges) > RANGES_SHOWN else []), *shown])
