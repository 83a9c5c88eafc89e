"""Every task has one status, however long ago it was closed, and also after a crash."""

import asyncio
import sqlite3
from contextlib import closing

import pytest
from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import open_journal, read_history

from millrace.journal import Ledger
from millrace.journal.ledger import LedgerStep


@given(st.lists(st.sampled_from(["train", "filter", "fail", "crash", "cover"]), max_size=40))
@settings(max_examples=25)
def test_every_task_has_its_status_after_any_history(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("journal")
    expected: dict[str, list[int]] = {}

    async def live() -> None:
        journal, number, version = open_journal(folder), 0, 0
        for event in events:
            if event == "crash":
                await journal.close()
                journal = open_journal(folder)
            elif event == "cover":
                await journal.discard_covered(version, position=journal.position)
            else:
                journal.issue_task(number, draw=None)
                if event == "train":
                    version += 1
                    await journal.admit_group(make_group(number))
                    await journal.begin_step(version, fresh=[number])
                    journal.finish_step(version, was_skipped=False)
                    expected.setdefault("trained", []).append(number)
                else:
                    journal.close_task(number, outcome="dropped", reason=event)
                    expected.setdefault(f"dropped: {event}", []).append(number)
                number += 1
        await journal.close()

    asyncio.run(live())
    assert read_history(folder).closed == expected


def test_ledger_refuses_contradictions():
    ledger = Ledger.begin(next_number=3, unfinished=[1])
    ledger.issue(3, draw=None)
    ledger.close(3, "failed: task")
    assert ledger.check() == []
    with pytest.raises(AssertionError, match="task 3 is closed already"):
        ledger.close(3, "failed: task")
    with pytest.raises(AssertionError, match="task 3 is closed or in training"):
        ledger.admit(3)
    with pytest.raises(AssertionError, match="task 5 is issued out of order"):
        ledger.issue(5, draw=None)
    assert ledger.check() == []
    ledger.totals["failed: task"] += 1
    assert ledger.check() == [
        "4 tasks were issued and 1 are open, so 3 are closed, but 4 are counted.",
    ]


@pytest.mark.parametrize(
    ("version", "fresh", "error"),
    [(2, [0], "step 2 begins out of order"), (1, [1], "task 1 of step 1 has no group")],
)
def test_ledger_refuses_a_step_that_cannot_be(version, fresh, error):
    ledger = Ledger.begin(next_number=2, unfinished=[0, 1])
    ledger.admit(0)
    with pytest.raises(AssertionError, match=error):
        ledger.begin_step(LedgerStep(version=version, fresh=tuple(fresh)))


async def test_task_that_is_closed_twice_keeps_its_first_status(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    journal.close_task(0, outcome="failed", reason="task")
    with pytest.raises(AssertionError, match="task 0 is closed already"):
        journal.close_task(0, outcome="dropped", reason="stale")
    await journal.close()
    assert read_history(tmp_path).closed == {"failed: task": [0]}


async def test_journal_with_the_former_table_of_problems_is_read(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    await journal.close()
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute("CREATE TABLE problems (position INTEGER NOT NULL, text TEXT NOT NULL)")
    journal = open_journal(tmp_path)
    journal.issue_task(1, draw=None)
    await journal.close()
    assert read_history(tmp_path).ledger.open == {0, 1}
