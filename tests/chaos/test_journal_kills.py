"""A journal whose process is killed between a write and its acknowledgement."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dying_journal import open_journal

from millrace.journal import read_journal
from millrace.journal.resuming import redone_numbers, reissued_numbers

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def write_until_killed(folder: Path, *, moment: str, number: int) -> tuple[list[int], list[int]]:
    """Numbers that were said to be admitted, and versions that were said to be begun."""
    process = subprocess.run(
        [sys.executable, HERE / "dying_journal.py", folder, moment, str(number)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY / "src", HERE.parent))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == -9, process.stderr
    *said, last = process.stdout.splitlines()
    assert last == "dies"
    told = [line.split() for line in said]
    return tuple([int(n) for what, n in told if what == kind] for kind in ("admitted", "begun"))


@pytest.mark.parametrize(
    ("moment", "number", "survives"),
    [("in write", 4, False), ("before sync", 5, True), ("after sync", 4, True)],
)
async def test_what_was_told_is_there_and_what_was_not_is_there_whole_or_not_at_all(
    tmp_path, moment, number, survives
):
    folder = tmp_path / "journal"
    admitted, begun = write_until_killed(folder, moment=moment, number=number)
    assert (admitted, begun) == (list(range(number)), [1, 2])
    past = read_journal(folder)
    assert past is not None
    ledger = past.ledger
    assert ledger.check() == []
    assert (past.torn is None) == survives
    durable = {*ledger.waiting, *redone_numbers(ledger, after=0)}
    assert durable == {*admitted, number} if survives else durable == set(admitted)
    assert ledger.last_begun == 2
    # Whoever goes on finds every number once: in a step, waiting, or to be played again.
    journal = open_journal(folder)
    known = [*durable, *reissued_numbers(journal.ledger)]
    assert sorted(known) == list(range(journal.ledger.next_number))
    groups = await journal.groups(sorted(durable))
    assert [group.number for group in groups] == sorted(durable)
    await journal.close()
