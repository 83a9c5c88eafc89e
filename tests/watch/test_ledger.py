"""`millrace inspect --ledger`."""

from fakes import make_group

from millrace.cli import main
from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, Ledger, Past
from millrace.journal.records import Closed


async def write_journal(folder, *, bad: bool = False) -> None:
    journal = Journal(
        folder,
        past=Past(ledger=Ledger.begin()),
        task_of=lambda number, draw: Task(prompt=str(number)),
        settings=JournalConfig(),
    )
    for number in range(8):
        journal.issued(number, draw=None)
    journal.closed(0, outcome="dropped", reason="zero_variance")
    journal.closed(3, outcome="failed", reason="score")
    for number in (1, 2, 4, 5, 6):
        await journal.admitted(make_group(number))
    await journal.begun(1, fresh=[1, 2])
    journal.applied(1, was_skipped=False)
    await journal.begun(2, fresh=[4, 5])
    if bad:
        journal._append(Closed(number=1, outcome="dropped", reason="stale"))
    await journal.close()


async def test_the_ledger_accounts_for_every_number(tmp_path, capsys):
    await write_journal(tmp_path / "journal")
    assert main(["inspect", str(tmp_path), "--ledger"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert found == {
        "issued": ["8", "0-7"],
        "trained": ["2", "by 1 steps"],
        "dropped: zero_variance": ["1"],
        "failed: score": ["1"],
        "pending: in a step": ["2", "4-5"],
        "pending: waiting": ["1", "6"],
        "pending: to be played": ["1", "7"],
        "step 1": ["2", "1-2"],
        "step 2, begun": ["2", "4-5"],
    }


async def test_books_that_do_not_add_up_are_an_error(tmp_path, capsys):
    await write_journal(tmp_path / "journal", bad=True)
    assert main(["inspect", str(tmp_path), "--ledger"]) == 1
    error = capsys.readouterr().err
    assert "does not add up" in error
    assert "Number 1 was dropped: stale when it could not be." in error


def test_a_folder_without_a_journal_is_a_sentence(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--ledger"]) == 2
    assert "holds no journal" in capsys.readouterr().err
