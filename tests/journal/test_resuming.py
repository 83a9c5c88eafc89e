"""How a journal and a checkpoint are combined when a run resumes."""

from dataclasses import replace

import pytest
from fakes import make_group
from journals import open_journal, read_history

from millrace.core.errors import JournalError
from millrace.core.records import Task
from millrace.run.resume import Cursor, advance_cursor, resume_history
from millrace.tasks.streams import Curriculum

TASKS = [Task(prompt=str(n)) for n in range(9)]


@pytest.fixture
async def checkpoint(tmp_path) -> Cursor:
    """Of version 1, in the middle of a run that then had numbers 0 to 7 and versions 2 and 3."""
    journal = open_journal(tmp_path)
    for number in range(8):
        journal.issue_task(number, draw=number % 5)
    for number in range(7):
        journal.record_solve_rate(number, solve_rate=number / 10, draw=number % 5)
        await journal.admit_group(make_group(number))
        if number == 1:
            await journal.begin_step(1, fresh=[0, 1])
            journal.finish_step(1, was_skipped=False)
            position = journal.position
    await journal.begin_step(2, fresh=[2, 3])
    journal.finish_step(2, was_skipped=False)
    await journal.begin_step(3, fresh=[5, 4])
    await journal.close()
    return Cursor(version=1, next_number=8, unfinished=(2, 3, 4, 5, 6, 7), journal=position)


async def test_steps_after_the_checkpoint_are_redone_and_other_groups_wait_or_run(
    tmp_path, checkpoint
):
    history, warnings = resume_history(tmp_path, checkpoint)
    assert warnings == []
    assert history.ledger.redone(after=1) == [2, 3, 5, 4]
    assert list(history.ledger.waiting) == [6]
    assert history.ledger.running == {7}


async def test_a_curriculum_learns_again_the_solve_rates_since_the_checkpoint(tmp_path, checkpoint):
    undisturbed, resumed = (
        Curriculum(TASKS, seed=0, target=0.5, explore_share=0.5) for _ in range(2)
    )
    for number in range(7):
        undisturbed.remember(number, number % 5)
        undisturbed.observe(number, number / 10)
        if number == 1:
            resumed.restore(undisturbed.state())
    history, _ = resume_history(tmp_path, checkpoint)
    cursor = Cursor(version=1, journal=checkpoint.journal)
    cursor = advance_cursor(cursor, history.ledger, resumed)
    assert resumed.state()["solve_rates"] == undisturbed.state()["solve_rates"]
    assert cursor.next_number == 8
    assert cursor.unfinished == (7,)
    assert resumed.task(7) is TASKS[7 % 5]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"journal": None}, "made without a journal"),
        ({"journal": 1000}, "ends before the newest checkpoint"),
        ({"version": 9}, "ends before the newest checkpoint"),
    ],
)
async def test_a_journal_that_does_not_match_the_checkpoint_is_replaced_with_a_warning(
    tmp_path, checkpoint, change, sentence
):
    checkpoint = replace(checkpoint, **change)
    history, (warning,) = resume_history(tmp_path, checkpoint)
    assert sentence in warning
    assert history.ledger.next_number == 8
    assert history.ledger.running == {2, 3, 4, 5, 6, 7}
    journal = open_journal(tmp_path, history=history)
    await journal.close()
    again = read_history(tmp_path)
    assert again.ledger.check() == []
    assert again.closed == {"unknown": [0, 1]}
    resumed, warnings = resume_history(tmp_path, checkpoint)
    assert resumed.is_new == bool(warnings) == (change == {"journal": None})


async def test_a_journal_that_begins_after_an_old_checkpoint_is_replaced(tmp_path, checkpoint):
    history, _ = resume_history(tmp_path, checkpoint)
    journal = open_journal(tmp_path, history=history)
    await journal.discard_covered(2, position=journal.position)
    await journal.close()
    _, (warning,) = resume_history(tmp_path, checkpoint)
    assert "begins after step 2" in warning


async def test_a_step_that_the_checkpoint_contains_is_applied(tmp_path, checkpoint):
    history, _ = resume_history(tmp_path, replace(checkpoint, version=3))
    assert history.ledger.check() == []
    assert history.ledger.totals == {"trained": 6}
    assert history.ledger.redone(after=3) == []


async def test_a_journal_that_changed_since_it_was_read_is_not_continued(tmp_path, checkpoint):
    history, _ = resume_history(tmp_path, checkpoint)
    other = open_journal(tmp_path, history=history)
    await other.close()
    with pytest.raises(JournalError, match="Another process has written"):
        open_journal(tmp_path, history=history)
