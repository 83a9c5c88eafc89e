"""Every task has one status, however long ago it was closed, and also after a crash."""

import asyncio

import pytest
from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import open_journal, read_history

from millrace.journal import Ledger
from millrace.journal.ledger import LedgerStep


@given(st.lists(st.sampled_from(["train", "filter", "fail", "crash", "cover"]), max_size=40))
@settings(max_examples=25, deadline=None)
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


def test_the_ledger_notices_contradictions():
    ledger = Ledger.begin(next_number=3, unfinished=[1])
    ledger.issue(3, draw=None)
    ledger.close(3, "failed: task")
    assert ledger.check() == []
    ledger.close(3, "failed: task")
    assert ledger.check() == [
        "Task 3 was failed: task in a state that rules this out.",
    ]
    ledger.totals["failed: task"] += 1
    assert ledger.check()[1:] == [
        "4 tasks were issued and 1 are open, so 3 are closed, but 4 are counted.",
    ]


@pytest.mark.parametrize(
    ("version", "fresh"), [(2, [0]), (1, [1])], ids=["a step is left out", "a task has no group"]
)
def test_the_ledger_notices_a_step_that_cannot_be(version, fresh):
    ledger = Ledger.begin(next_number=2, unfinished=[0, 1])
    ledger.admit(0)
    ledger.begin_step(LedgerStep(version=version, fresh=tuple(fresh)))
    assert ledger.check() == [
        f"Task {fresh[0]} was put into step {version} in a state that rules this out."
    ]


async def test_problems_are_on_record_once(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    for _ in range(2):
        journal.close_task(0, outcome="failed", reason="task")
    await journal.close()
    journal = open_journal(tmp_path)
    journal.issue_task(1, draw=None)
    await journal.close()
    problem = "Task 0 was failed: task in a state that rules this out."
    assert read_history(tmp_path).ledger.problems == [problem]
