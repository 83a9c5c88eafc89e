"""`millrace inspect --ledger`."""

import sqlite3
from contextlib import closing

import pytest
from fakes import make_group

from millrace.cli.main import main
from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal


async def write_journal(folder, *, history: JournalHistory | None = None, first: int = 0) -> None:
    history = history or JournalHistory(ledger=Ledger.begin())
    version = history.ledger.last_step
    journal = Journal(
        folder,
        history=history,
        task_of=lambda number, draw: Task(prompt=str(number)),
        settings=JournalConfig(),
    )
    for number in range(first, first + 8):
        journal.issue_task(number, draw=None)
    journal.close_task(first, outcome="dropped", reason="zero_variance")
    journal.close_task(first + 3, outcome="failed", reason="score")
    for number in (1, 2, 4, 5, 6):
        await journal.admit_group(make_group(first + number))
    await journal.begin_step(version + 1, fresh=[first + 1, first + 2])
    journal.finish_step(version + 1, was_skipped=False)
    await journal.begin_step(version + 2, fresh=[first + 4, first + 5])
    await journal.close()


async def test_the_ledger_lists_every_task(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    assert main(["inspect", str(tmp_path), "--ledger"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert found == {
        "issued": ["8", "0-7"],
        "trained": ["2", "by 1 steps: 1-2"],
        "dropped: zero_variance": ["1", "0"],
        "failed: score": ["1", "3"],
        "training": ["2", "4-5"],
        "waiting": ["1", "6"],
        "running": ["1", "7"],
        "step 1, applied": ["2", "1-2"],
        "step 2, begun": ["2", "4-5"],
    }


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (0, "dropped: zero_variance"),
        (2, "trained"),
        (5, "training"),
        (6, "waiting"),
        (7, "running"),
        (8, "not issued"),
    ],
)
async def test_the_ledger_gives_the_status_of_one_task(tmp_path, capsys, number, status):
    await write_journal(tmp_path / "journal")
    assert main(["inspect", str(tmp_path), "--number", str(number)]) == 0
    assert capsys.readouterr().out == f"{number}: {status}\n"


async def test_a_task_without_a_row_is_an_error(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    await write_journal(tmp_path / "journal", history=read_journal(tmp_path / "journal"), first=8)
    with closing(sqlite3.connect(tmp_path / "journal" / "journal.db")) as db, db:
        db.execute("DELETE FROM tasks WHERE number = 2")
    assert main(["inspect", str(tmp_path), "--ledger"]) == 1
    assert "Task 2 has no status." in capsys.readouterr().err


async def test_a_ledger_that_does_not_add_up_is_an_error(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    with closing(sqlite3.connect(tmp_path / "journal" / "journal.db")) as db, db:
        db.execute("DELETE FROM tasks WHERE number = 2")
    assert main(["inspect", str(tmp_path), "--ledger"]) == 1
    error = capsys.readouterr().err
    assert "does not add up" in error
    assert "8 tasks were issued and 4 are open, so 4 are closed, but 3 are counted." in error


def test_folder_without_a_journal_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--ledger"]) == 2
    assert "has no journal" in capsys.readouterr().err
