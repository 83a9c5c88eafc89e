"""The database of a journal: what it keeps, what it deletes, and what damage to it costs."""

import asyncio
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fakes import make_group
from full_disk import files_of_at_most
from journals import open_journal, read_history

from millrace.core.errors import JournalError
from millrace.core.records import Task
from millrace.journal import Journal, read_journal
from millrace.journal.database import NAME, encode_group


async def admit(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        journal.issue_task(number, draw=None)
    await asyncio.gather(*(journal.admit_group(make_group(number)) for number in numbers))


async def train(journal: Journal, version: int, *numbers: int) -> None:
    await journal.begin_step(version, fresh=numbers)
    journal.finish_step(version, was_skipped=False)


async def test_a_group_is_read_as_it_was_admitted_with_the_task_of_its_number(tmp_path):
    group = make_group(3, kept=True, routes=True, versions=[1, 1, 2, 2])
    journal = open_journal(tmp_path)
    await admit(journal, 0, 1, 2)
    journal.issue_task(3, draw=7)
    await journal.admit_group(group)
    (found,) = await journal.read_groups([3])
    await journal.close()
    assert found.task == Task(prompt="task 3", columns={"draw": 7})
    assert found.scores == group.scores
    np.testing.assert_array_equal(found.advantages, group.advantages)
    for mine, other in zip(found.rollouts, group.rollouts, strict=True):
        np.testing.assert_array_equal(mine.tokens, other.tokens)
        np.testing.assert_array_equal(mine.engine_logprobs, other.engine_logprobs)
        np.testing.assert_array_equal(mine.kept.ids, other.kept.ids)
        np.testing.assert_array_equal(mine.routes, other.routes)
        assert mine.sampling == other.sampling


async def test_a_group_that_cannot_be_encoded_is_an_error_with_a_remedy(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    group = make_group(0)
    group.episodes[0].counts["odd"] = object()  # pyright: ignore
    with pytest.raises(JournalError, match=r"Group 0 cannot be written.*journal.max_bytes to 0"):
        await journal.admit_group(group)
    await journal.close()


async def test_one_commit_serves_all_changes_that_have_gathered(tmp_path):
    journal = open_journal(tmp_path, commit_interval_s=0.05)
    await admit(journal, *range(20))
    await journal.close()
    assert journal._writer.num_commits < 20
    assert list(read_history(tmp_path).ledger.waiting) == list(range(20))


async def test_the_journal_is_readable_while_the_run_writes_and_reading_changes_nothing(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0, 1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if "shm" not in path.name}
    assert list(read_history(tmp_path).ledger.waiting) == [0, 1]
    after = {path: path.read_bytes() for path in tmp_path.iterdir() if "shm" not in path.name}
    assert after == before
    await admit(journal, 2)
    assert list(read_history(tmp_path).ledger.waiting) == [0, 1, 2]
    await journal.close()


async def test_the_journal_is_readable_where_nothing_may_be_written(tmp_path):
    journal = open_journal(tmp_path / "journal")
    await admit(journal, 0)
    await journal.close()
    (tmp_path / "journal" / NAME).chmod(stat.S_IRUSR)
    (tmp_path / "journal").chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert list(read_history(tmp_path / "journal").ledger.waiting) == [0]
    finally:
        (tmp_path / "journal").chmod(stat.S_IRWXU)


async def test_a_torn_log_costs_the_last_transactions_only(tmp_path):
    journal = open_journal(tmp_path / "whole")
    for number in range(4):
        await admit(journal, number)
    database, log = ((tmp_path / "whole" / f"{NAME}{end}").read_bytes() for end in ("", "-wal"))
    await journal.close()
    found: list[int] = []
    for end in range(0, len(log), 997):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / NAME).write_bytes(database)
        (folder / f"{NAME}-wal").write_bytes(log[:end])
        history = read_journal(folder, verify=True)
        found.append(-1 if history is None else len(history.ledger.waiting))
        if end % 10 == 0:
            again = open_journal(folder)
            await again.close()
            assert read_history(folder).ledger.check() == []
    assert found == sorted(found)
    assert {*found} >= {-1, 1, 2, 3}


def flip(path: Path, pattern: bytes, *, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(pattern) + at
    data[place] ^= 1
    path.write_bytes(data)


async def test_damage_to_a_payload_is_refused_with_its_task(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0, 1)
    await journal.close()
    flip(tmp_path / NAME, encode_group(make_group(1))[-16:])
    journal = open_journal(tmp_path)
    assert len(await journal.read_groups([0])) == 1
    with pytest.raises(JournalError, match=r"checksum of the group of task 1 .*Restore.*copy"):
        await journal.read_groups([1])
    await journal.close()


@pytest.mark.parametrize("damage", ["header", "cut", "page"])
async def test_damage_to_the_structure_is_refused(tmp_path, damage):
    journal = open_journal(tmp_path)
    await admit(journal, *range(40))
    await journal.close()
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[0] ^= 1
    elif damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[8192 * 3 : 8192 * 5] = bytes(8192 * 2)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged: .*Restore it from a copy, or remove"):
        read_journal(tmp_path, verify=True)


async def test_a_missing_group_is_noticed(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0, 1)
    await journal.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as db, db:
        db.execute("DELETE FROM groups WHERE number = 1")
    with pytest.raises(JournalError, match="the group of task 1 is missing"):
        read_journal(tmp_path)


async def test_journals_of_other_formats_are_refused(tmp_path):
    journal = open_journal(tmp_path)
    await journal.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as db, db:
        db.execute("UPDATE meta SET value = 99 WHERE key = 'format_version'")
    with pytest.raises(JournalError, match="has format 99, and this version of Millrace reads"):
        read_journal(tmp_path)
    (tmp_path / "00000001.log").write_bytes(b"millrace journal 1\n")
    for use in (read_journal, open_journal):
        with pytest.raises(JournalError, match=r"written by an older version of Millrace; resume"):
            use(tmp_path)


async def test_covered_groups_are_deleted_the_file_shrinks_and_the_ledger_stays(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0)  # waits to the end
    sizes = []
    for version in range(1, 60):
        numbers = range(8 * version - 7, 8 * version + 1)
        await admit(journal, *numbers)
        await train(journal, version, *numbers)
        if version % 5 == 0:
            await journal.flush()
            await journal.discard_covered(version, position=journal.position)
            sizes.append(journal.num_bytes)
    journal.close_task(0, outcome="dropped", reason="stale")
    await journal.close()
    history = read_history(tmp_path)
    assert history.ledger.check() == []
    assert history.ledger.totals == {"trained": 472, "dropped: stale": 1}
    assert sorted(history.ledger.steps) == [56, 57, 58, 59]
    assert sizes[-1] < 2 * sizes[0]
    assert (tmp_path / NAME).stat().st_size < 6 * sizes[0]


async def test_a_file_that_is_mostly_free_shrinks_step_by_step(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, *range(400))
    await train(journal, 1, *range(400))
    await journal.flush()
    large = journal._writer._db.execute("PRAGMA page_count").fetchone()[0]
    await journal.discard_covered(1, position=journal.position)
    for number in range(400, 410):
        await admit(journal, number)
    assert journal._writer._db.execute("PRAGMA page_count").fetchone()[0] < large / 2
    await journal.close()


async def test_a_group_that_may_be_trained_once_more_outlives_its_step(tmp_path):
    journal = open_journal(tmp_path)
    for version in range(1, 20):
        await admit(journal, version - 1)
        await train(journal, version, version - 1)
        await journal.discard_covered(version, position=journal.position, keep=[3])
    await journal.begin_step(20, fresh=[], replayed=[3])
    await journal.close()
    again = open_journal(tmp_path)
    assert [group.number for group in await again.read_groups([3])] == [3]
    await again.close()


async def test_a_full_disk_fails_every_caller_with_one_sentence_and_the_run_resumes(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0)
    log = (tmp_path / f"{NAME}-wal").stat().st_size
    with files_of_at_most(log + 100):
        journal.issue_task(1, draw=None)
        for _ in range(2):
            with pytest.raises(JournalError, match=r"could not be written .*Make room.*--resume"):
                await journal.admit_group(make_group(1))
        with pytest.raises(JournalError):
            await journal.begin_step(1, fresh=[1])
    await journal.close()
    again = open_journal(tmp_path)
    assert list(again.ledger.waiting) == [0]
    await admit(again, 1)
    assert [group.number for group in await again.read_groups([0, 1])] == [0, 1]
    await again.close()


async def test_unwritable_folder_raises_one_sentence(tmp_path):
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(JournalError, match="could not be written"):
        open_journal(tmp_path / "journal" / "below")


async def test_a_caller_that_stops_waiting_does_not_disturb_the_writer(tmp_path):
    journal = open_journal(tmp_path, commit_interval_s=0.05)
    journal.issue_task(0, draw=None)
    waiting = asyncio.create_task(journal.admit_group(make_group(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    journal.reopen_task(0)
    await journal.admit_group(make_group(0))
    assert len(await journal.read_groups([0])) == 1
    await journal.close()


async def test_each_commit_is_synced_to_the_disk(tmp_path):
    journal = open_journal(tmp_path)
    db = journal._writer._db
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await journal.close()
