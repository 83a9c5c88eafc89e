"""What became of each number, one by one, however long ago, and also after a crash."""

import asyncio
from pathlib import Path

from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, TaskStatusFile, read_journal
from millrace.journal.ledger import TaskStatus

SMALL = JournalConfig(segment_bytes=2048, max_bytes=2**20, commit_interval_s=0, fsync=False)


def open_journal(folder: Path) -> Journal:
    past = read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    return Journal(folder, past=past, task_of=lambda n, _: Task(prompt=str(n)), settings=SMALL)


def fates_in(folder: Path) -> dict[str, list[int]]:
    past = read_journal(folder)
    assert past is not None
    return TaskStatusFile(folder).read(past.ledger)


@given(st.lists(st.sampled_from(["train", "filter", "fail", "crash", "cover"]), max_size=40))
@settings(max_examples=25, deadline=None)
def test_every_number_has_its_fate_after_any_course(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("journal")
    expected: dict[str, list[int]] = {}

    async def live() -> None:
        journal, number, version = open_journal(folder), 0, 0
        for event in events:
            if event == "crash":
                await journal.close()
                journal = open_journal(folder)
            elif event == "cover":
                await journal.cover(version, position=journal.position)
            else:
                journal.issued(number, draw=None)
                if event == "train":
                    version += 1
                    await journal.admitted(make_group(number))
                    await journal.begun(version, fresh=[number])
                    journal.applied(version, was_skipped=False)
                    expected.setdefault("trained", []).append(number)
                else:
                    journal.closed(number, outcome="dropped", reason=event)
                    expected.setdefault(f"dropped: {event}", []).append(number)
                number += 1
        await journal.close()

    asyncio.run(live())
    assert fates_in(folder) == expected


def test_what_a_crash_took_back_from_the_books_is_open_again(tmp_path):
    ahead = Ledger.begin(next_number=5, unfinished=range(5))
    ahead.closed = {1: TaskStatus(what="dropped: stale"), 2: TaskStatus(what="trained", version=3)}
    fates = TaskStatusFile(tmp_path)
    fates.begin(ahead)
    behind = Ledger.begin(next_number=4, unfinished=[0, 2, 3])
    TaskStatusFile(tmp_path).begin(behind)
    assert fates.read(behind) == {"dropped: stale": [1]}
    assert (tmp_path / "fates.bin").stat().st_size == 4 * 4
