"""What groups in flight were told, on the disk: kept while it is needed, and no longer."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from fakes import make_completion, make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import JournalConfig
from millrace.core.errors import JournalError
from millrace.core.partials import GroupProgress, StreamedTokens, put_together
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.encoding import decode_progress, encode_progress
from millrace.journal.framing import scan

SMALL = JournalConfig(segment_bytes=4096, max_bytes=2**20, commit_interval_s=0)


def open_journal(folder: Path) -> Journal:
    past = read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    return Journal(folder, past=past, task_of=lambda n, _: Task(prompt=str(n)), settings=SMALL)


def told(text: str, *, start: int = 0, member: int = 0) -> GroupProgress:
    part = make_completion(text)
    one = StreamedTokens(request="group 0/0", digest="d", member=member, start=start, part=part)
    return GroupProgress(told=(one,))


async def write(journal: Journal, number: int, *texts: str, tries: int = 0, first: int = 0) -> None:
    for part, text in enumerate(texts, start=first):
        await journal.progressed(number, tries=tries, part=part, progress=told(text))


async def texts_of(journal: Journal, number: int) -> list[str]:
    parts = await journal.progress(number)
    return [one.part.text for part in parts for one in part.told]


async def reopened(journal: Journal) -> Journal:
    await journal.close()
    return open_journal(journal._segments.folder)


async def test_progress_comes_back_in_order_for_what_is_played(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.issued(number, draw=None)
    await write(journal, 0, "a", "b")
    await write(journal, 1, "x")
    journal = await reopened(journal)
    await write(journal, 0, "c", first=2)
    journal = await reopened(journal)
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    assert await texts_of(journal, 1) == ["x"]
    assert await texts_of(journal, 7) == []
    await journal.close()


async def test_a_group_that_is_complete_dropped_or_begun_anew_needs_no_progress(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(3):
        journal.issued(number, draw=None)
        await write(journal, number, "a", "b")
    await journal.admitted(make_group(0))
    journal.closed(1, outcome="dropped", reason="stale")
    journal.reopened(2)
    assert [await texts_of(journal, number) for number in range(3)] == [[], [], []]
    await write(journal, 2, "late", first=2)  # of the try that was given up, on its way meanwhile
    await write(journal, 2, "new", tries=1)
    journal = await reopened(journal)
    assert [await texts_of(journal, number) for number in range(3)] == [[], [], ["new"]]
    assert journal.ledger.tries == {2: 1}
    await journal.close()


async def test_tries_are_counted_until_the_number_is_closed(tmp_path):
    journal = open_journal(tmp_path)
    journal.issued(0, draw=None)
    journal.reopened(0)
    journal.reopened(0)
    journal = await reopened(journal)
    assert journal.ledger.tries == {0: 2}
    journal.closed(0, outcome="dropped", reason="stale")
    assert journal.ledger.tries == {}
    await journal.close()


async def test_progress_moves_out_of_segments_that_go_and_dead_progress_goes_with_them(tmp_path):
    journal = open_journal(tmp_path)
    journal.issued(0, draw=None)
    await write(journal, 0, "a", "b")  # is played all the time
    for version in range(1, 30):
        journal.issued(version, draw=None)
        await write(journal, version, *("x" * 60 for _ in range(5)))
        await journal.admitted(make_group(version))
        await journal.begun(version, fresh=[version])
        journal.applied(version, was_skipped=False)
        await journal.cover(version, position=journal.position)
        assert journal.num_bytes < 8 * SMALL.segment_bytes
    await write(journal, 0, "c", first=2)
    assert not (tmp_path / "00000001.log").exists()
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    journal = await reopened(journal)
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    assert len(list(journal._parts.items())) == 3
    await journal.close()


async def test_a_torn_end_costs_the_parts_in_it_and_damage_before_it_is_refused(tmp_path):
    whole = open_journal(tmp_path / "whole")
    whole.issued(0, draw=None)
    await write(whole, 0, "a", "b", "c")
    await whole.close()
    data = (tmp_path / "whole" / "00000001.log").read_bytes()
    ends = [found.end for found in scan(memoryview(data))]
    for num_lost in (1, 2, 3):
        folder = tmp_path / str(num_lost)
        folder.mkdir()
        (folder / "00000001.log").write_bytes(data[: ends[-num_lost] - 1])
        journal = open_journal(folder)
        assert await texts_of(journal, 0) == ["a", "b", "c"][: 3 - num_lost]
        await journal.close()
    damaged = bytearray(data)
    damaged[ends[2] - 1] ^= 1
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "00000001.log").write_bytes(damaged)
    with pytest.raises(JournalError, match=r"is damaged at byte"):
        read_journal(folder)


async def test_compaction_waits_for_groups_whose_place_is_not_known_yet(tmp_path):
    """They are on the disk, in a segment that has been followed by others, and nobody has heard
    where, because the loop was busy."""
    journal = open_journal(tmp_path)
    for number in range(12):
        journal.issued(number, draw=None)
    admitting = [asyncio.create_task(journal.admitted(make_group(n))) for n in range(6)]
    await asyncio.sleep(0)
    while journal._writer.num_commits == 0 or not journal._writer._queue.empty():
        pass  # the writer's thread goes on; this loop does not
    covering = asyncio.create_task(journal.cover(0, position=journal.position))
    await asyncio.gather(*admitting, covering)
    for number in range(6, 12):
        await journal.admitted(make_group(number))
    await journal.cover(0, position=journal.position)
    assert [group.number for group in await journal.groups(range(12))] == list(range(12))
    await journal.close()


def test_what_follows_nothing_that_is_known_is_left_out():
    parts = [told("ab"), told("c", start=5), told("d", start=2), told("e", start=1, member=1)]
    known = put_together(one for part in parts for one in part.told)
    assert set(known) == {("group 0/0", 0)}
    assert known["group 0/0", 0].completion.tokens.tolist() == [ord(c) for c in "abd"]


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_make_progress_but_what_is_some(data):
    with contextlib.suppress(JournalError):
        decode_progress(memoryview(data))


@given(st.data())
@settings(max_examples=200)
def test_progress_that_was_changed_anywhere_is_refused_or_still_some(data):
    payload = bytearray(encode_progress(told("abc")))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(JournalError):
        decode_progress(memoryview(bytes(payload)))
