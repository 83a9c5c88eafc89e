"""How a journal and a checkpoint go together."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_group

from millrace.config import JournalConfig
from millrace.controller.controller import Cursor
from millrace.core.errors import JournalError
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.resuming import Checkpointed, recall, redone_numbers, reissued_numbers
from millrace.run.resume import continued
from millrace.tasks.curriculum import Curriculum

TASKS = [Task(prompt=str(n)) for n in range(9)]


def open_journal(folder: Path, past: JournalHistory | None = None) -> Journal:
    return Journal(
        folder,
        past=past or JournalHistory(ledger=Ledger.begin()),
        task_of=lambda number, draw: TASKS[draw or 0],
        settings=JournalConfig(commit_interval_s=0),
    )


@pytest.fixture
async def checkpoint(tmp_path) -> Checkpointed:
    """Of version 1, in the middle of a run that then had numbers 0 to 7 and versions 2 and 3."""
    journal = open_journal(tmp_path)
    for number in range(8):
        journal.issued(number, draw=number % 5)
    for number in range(7):
        journal.observed(number, solve_rate=number / 10, draw=number % 5)
        await journal.admitted(make_group(number))
        if number == 1:
            await journal.begun(1, fresh=[0, 1])
            journal.applied(1, was_skipped=False)
            position = journal.position
    await journal.begun(2, fresh=[2, 3])
    journal.applied(2, was_skipped=False)
    await journal.begun(3, fresh=[5, 4])
    await journal.close()
    return Checkpointed(version=1, next_number=8, unfinished=(2, 3, 4, 5, 6, 7), position=position)


async def test_steps_beyond_the_checkpoint_are_redone_and_the_rest_waits_or_is_played(
    tmp_path, checkpoint
):
    past, doubts = recall(tmp_path, checkpoint)
    assert doubts == []
    assert redone_numbers(past.ledger, after=1) == [2, 3, 5, 4]
    assert list(past.ledger.waiting) == [6]
    assert reissued_numbers(past.ledger) == [7]


async def test_a_curriculum_learns_again_what_came_after_the_checkpoint(tmp_path, checkpoint):
    undisturbed, resumed = (
        Curriculum(TASKS, seed=0, target=0.5, explore_share=0.5) for _ in range(2)
    )
    for number in range(7):
        undisturbed.remember(number, number % 5)
        undisturbed.observe(number, number / 10)
        if number == 1:
            resumed.restore(undisturbed.state())
    past, _ = recall(tmp_path, checkpoint)
    cursor = Cursor(version=1, journal=checkpoint.position)
    cursor = continued(cursor, past.ledger, resumed)
    assert [resumed.solve_rate(n) for n in range(9)] == [
        undisturbed.solve_rate(n) for n in range(9)
    ]
    assert cursor.next_number == 8
    assert cursor.unfinished == (7,)
    assert resumed.task(7) is TASKS[7 % 5]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position": None}, "made without one"),
        ({"position": 1000}, "ends before the newest checkpoint"),
        ({"version": 9}, "ends before the newest checkpoint"),
    ],
)
async def test_a_journal_that_does_not_meet_the_checkpoint_gives_way_and_says_so(
    tmp_path, checkpoint, change, sentence
):
    checkpoint = replace(checkpoint, **change)
    past, (doubt,) = recall(tmp_path, checkpoint)
    assert sentence in doubt
    assert past.ledger.next_number == 8
    assert reissued_numbers(past.ledger) == [2, 3, 4, 5, 6, 7]
    journal = open_journal(tmp_path, past)
    await journal.close()
    again = read_journal(tmp_path)
    assert again is not None
    assert again.ledger.check() == []
    assert again.ledger.totals == {"before this journal": 2}


async def test_a_journal_that_begins_after_an_old_checkpoint_gives_way(tmp_path, checkpoint):
    past, _ = recall(tmp_path, checkpoint)
    journal = open_journal(tmp_path, past)
    journal.ledger.cover(2, position=journal.position)
    await journal.close()
    open_again = open_journal(tmp_path, read_journal(tmp_path))
    open_again.ledger.cover(2, position=open_again.position)
    open_again._append(open_again.ledger.snapshot())
    await open_again.close()
    _, (doubt,) = recall(tmp_path, checkpoint)
    assert "begins after step 2" in doubt


async def test_a_step_that_a_checkpoint_proves_is_applied(tmp_path, checkpoint):
    past, _ = recall(tmp_path, replace(checkpoint, version=3))
    assert past.ledger.check() == []
    assert past.ledger.totals == {"trained": 6}
    assert redone_numbers(past.ledger, after=3) == []


async def test_what_was_written_since_it_was_read_is_not_removed(tmp_path, checkpoint):
    past, _ = recall(tmp_path, checkpoint)
    other = open_journal(tmp_path, past)
    await other.close()
    with pytest.raises(JournalError, match="was written to while it was read"):
        open_journal(tmp_path, past)
