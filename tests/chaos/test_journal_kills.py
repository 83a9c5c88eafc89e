"""A journal whose process is killed before, during and after a commit."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed_journal import open_journal

from millrace.journal import read_journal

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
NEVER = 10**9


def start(folder: Path, *, moment: str, number: int) -> subprocess.Popen[str]:
    paths = (REPOSITORY / "src", HERE.parent)
    return subprocess.Popen(
        [sys.executable, HERE / "killed_journal.py", folder, moment, str(number)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def acknowledged(stdout: str) -> tuple[list[int], list[int]]:
    """Groups that were reported as admitted, and versions whose steps were reported as begun."""
    whole = [line for line in stdout.splitlines(keepends=True) if line.endswith("\n")]
    lines = [line.split() for line in whole if line.count(" ") == 1]
    return tuple([int(n) for what, n in lines if what == kind] for kind in ("admitted", "begun"))


@pytest.mark.parametrize(
    ("moment", "number", "survives", "killed_by"),
    [
        ("before commit", 4, False, signal.SIGKILL),
        ("in write", 5, False, signal.SIGXFSZ),
        ("after commit", 4, True, signal.SIGKILL),
    ],
)
async def test_acknowledged_changes_survive_and_others_are_atomic(
    tmp_path, moment, number, survives, killed_by
):
    folder = tmp_path / "journal"
    process = start(folder, moment=moment, number=number)
    stdout, stderr = process.communicate()
    assert process.returncode == -killed_by, stderr
    assert stdout.splitlines()[-1] == "dies"
    admitted, begun = acknowledged(stdout)
    assert (admitted, begun) == (list(range(number)), [1, 2])
    history = read_journal(folder, verify=True)
    assert history is not None
    ledger = history.ledger
    assert ledger.check() == []
    durable = {*ledger.waiting, *ledger.redone(after=0)}
    assert durable == {*admitted, number} if survives else durable == set(admitted)
    assert ledger.last_step == 2
    await assert_resumes(folder, durable)


async def test_acknowledged_changes_survive_kills_at_random_moments(tmp_path):
    rng = random.Random(0)
    for kill in range(6):
        folder = tmp_path / str(kill)
        process = start(folder, moment="never", number=NEVER)
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(rng.randrange(1, 40))]
        await asyncio.sleep(rng.random() * 0.02)
        process.kill()
        stdout, _ = process.communicate()
        admitted, begun = acknowledged("".join(first) + stdout)
        history = read_journal(folder, verify=True)
        assert history is not None
        assert history.ledger.check() == []
        durable = {*history.ledger.waiting, *history.ledger.redone(after=0)}
        assert durable >= {*admitted}
        assert history.ledger.last_step >= max(begun, default=0)
        await assert_resumes(folder, durable)


async def assert_resumes(folder: Path, durable: set[int]) -> None:
    """Every task is found once: in a step, waiting, or to be run again."""
    journal = open_journal(folder)
    known = [*durable, *journal.ledger.running]
    assert sorted(known) == list(range(journal.ledger.next_number))
    groups = await journal.read_groups(sorted(durable))
    assert [group.number for group in groups] == sorted(durable)
    await journal.close()
