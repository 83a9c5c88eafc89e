"""`millrace inspect --ledger`."""

import pytest
from fakes import make_group

from millrace.cli.main import main
from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.records import ClosedRecord


async def write_journal(
    folder, *, bad: bool = False, past: JournalHistory | None = None, first: int = 0
) -> None:
    past = past or JournalHistory(ledger=Ledger.begin())
    version = past.ledger.last_begun
    journal = Journal(
        folder,
        past=past,
        task_of=lambda number, draw: Task(prompt=str(number)),
        settings=JournalConfig(),
    )
    for number in range(first, first + 8):
        journal.issued(number, draw=None)
    journal.closed(first, outcome="dropped", reason="zero_variance")
    journal.closed(first + 3, outcome="failed", reason="score")
    for number in (1, 2, 4, 5, 6):
        await journal.admitted(make_group(first + number))
    await journal.begun(version + 1, fresh=[first + 1, first + 2])
    journal.applied(version + 1, was_skipped=False)
    await journal.begun(version + 2, fresh=[first + 4, first + 5])
    if bad:
        journal._append(ClosedRecord(number=1, outcome="dropped", reason="stale"))
    await journal.close()


async def test_the_ledger_accounts_for_every_number(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    assert main(["inspect", str(tmp_path), "--ledger"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert found == {
        "issued": ["8", "0-7"],
        "trained": ["2", "by 1 steps: 1-2"],
        "dropped: zero_variance": ["1", "0"],
        "failed: score": ["1", "3"],
        "pending: in a step": ["2", "4-5"],
        "pending: waiting": ["1", "6"],
        "pending: to be played": ["1", "7"],
        "step 1": ["2", "1-2"],
        "step 2, begun": ["2", "4-5"],
    }


@pytest.mark.parametrize(
    ("number", "fate"),
    [
        (0, "dropped: zero_variance"),
        (2, "trained"),
        (5, "pending: in a step"),
        (6, "pending: waiting"),
        (7, "pending: to be played"),
        (8, "not issued"),
    ],
)
async def test_the_ledger_says_what_became_of_one_number(tmp_path, capsys, number, fate):
    await write_journal(tmp_path / "journal")
    assert main(["inspect", str(tmp_path), "--number", str(number)]) == 0
    assert capsys.readouterr().out == f"{number}: {fate}\n"


async def test_a_number_that_is_counted_but_not_written_down_is_an_error(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    await write_journal(tmp_path / "journal", past=read_journal(tmp_path / "journal"), first=8)
    (tmp_path / "journal" / "fates.bin").unlink()
    assert main(["inspect", str(tmp_path), "--ledger"]) == 1
    assert "4 numbers count as 'trained', and 2 are written down" in capsys.readouterr().err


async def test_books_that_do_not_add_up_are_an_error(tmp_path, capsys):
    await write_journal(tmp_path / "journal", bad=True)
    assert main(["inspect", str(tmp_path), "--ledger"]) == 1
    error = capsys.readouterr().err
    assert "does not add up" in error
    assert "Number 1 was dropped: stale when it could not be." in error


def test_a_folder_without_a_journal_is_a_sentence(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--ledger"]) == 2
    assert "holds no journal" in capsys.readouterr().err
