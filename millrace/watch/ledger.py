"""What `millrace inspect --ledger` says: what became of every number that was issued.

Promise: reads only, also while the run goes on.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.table import Table

from millrace.core.errors import ConfigError
from millrace.journal import Ledger, read_journal
from millrace.journal.ledger import TRAINED
from millrace.watch.run_dir import RunDir

STEPS_SHOWN = 10


def read_ledger(path: str | Path) -> Ledger:
    past = read_journal(RunDir(path).journal)
    if past is None:
        raise ConfigError(
            f"{path} holds no journal: it is no run directory, or journal.enabled was false."
        )
    return past.ledger


def ledger_table(ledger: Ledger) -> Table:
    """For the terminal: how many numbers, what became of them, and which."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for label, count, text in _rows(ledger):
        table.add_row(label, f"{count}", text)
    return table


def _rows(ledger: Ledger) -> Iterator[tuple[str, int, str]]:
    yield "issued", ledger.next_number, f"0-{ledger.next_number - 1}" if ledger.next_number else ""
    yield TRAINED, ledger.totals[TRAINED], f"by {_applied(ledger)} steps"
    for what, count in sorted(ledger.totals.items()):
        if what != TRAINED:
            yield what, count, ""
    in_steps = ledger.in_steps
    waiting = set(ledger.waiting)
    yield "pending: in a step", len(in_steps), _ranges(in_steps)
    yield "pending: waiting", len(waiting), _ranges(waiting)
    playing = ledger.open - in_steps - waiting
    yield "pending: to be played", len(playing), _ranges(playing)
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
    """Such as "0-4, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
