"""What lies on the disk: frames, segments, groups; and what is made of damage to them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import JournalConfig
from millrace.core.errors import JournalError
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal
from millrace.journal.encoding import decode_group, decode_record, encode_group, encode_record
from millrace.journal.framing import SEGMENT_MAGIC, frame, is_torn, scan
from millrace.journal.records import ClosedRecord, IssuedRecord, LedgerSnapshot

SMALL = JournalConfig(segment_bytes=4096, max_bytes=2**20, commit_interval_s=0)


def task_of(number: int, draw: int | None) -> Task:
    return Task(prompt=f"task {number}", columns={"draw": draw})


def open_journal(folder: Path, *, settings: JournalConfig = SMALL, **more) -> Journal:
    past = read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    return Journal(folder, past=past, task_of=task_of, settings=settings, **more)


async def admit(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        journal.issued(number, draw=None)
    await asyncio.gather(*(journal.admitted(make_group(number)) for number in numbers))


async def train(journal: Journal, version: int, *numbers: int) -> None:
    await journal.begun(version, fresh=numbers)
    journal.applied(version, was_skipped=False)


def newest(folder: Path) -> Path:
    return sorted(folder.glob("*.log"))[-1]


def past_of(folder: Path) -> JournalHistory:
    past = read_journal(folder)
    assert past is not None
    return past


async def test_a_group_comes_back_as_it_was_with_the_task_its_number_stands_for(tmp_path):
    group = make_group(3, kept=True, routes=True, versions=[1, 1, 2, 2])
    journal = open_journal(tmp_path)
    await admit(journal, 0, 1, 2)
    journal.issued(3, draw=7)
    await journal.admitted(group)
    (found,) = await journal.groups([3])
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


async def test_a_group_that_cannot_be_written_says_so_with_a_remedy(tmp_path):
    journal = open_journal(tmp_path)
    journal.issued(0, draw=None)
    group = make_group(0)
    group.episodes[0].counts["odd"] = object()  # pyright: ignore
    with pytest.raises(JournalError, match=r"Group 0 cannot be written.*journal.enabled"):
        await journal.admitted(group)
    await journal.close()


async def test_one_sync_serves_all_that_has_gathered(tmp_path):
    journal = open_journal(tmp_path, settings=JournalConfig(commit_interval_s=0.05))
    await admit(journal, *range(20))
    await journal.close()
    assert journal._writer.num_commits < 20
    assert list(past_of(tmp_path).ledger.waiting) == list(range(20))


async def test_a_torn_end_is_left_out_wherever_it_was_torn(tmp_path):
    journal = open_journal(tmp_path / "whole")
    await admit(journal, 0)
    await journal.close()
    data = newest(tmp_path / "whole").read_bytes()
    durable = [len(SEGMENT_MAGIC), *(found.end for found in scan(memoryview(data)))]
    for end in range(len(data)):
        folder = tmp_path / str(end)
        folder.mkdir()
        newest_file = folder / "00000001.log"
        newest_file.write_bytes(data[:end])
        past = read_journal(folder)
        whole = [one for one in durable if one <= end]
        assert (past is not None) == (len(whole) > 1)
        if past is not None:
            assert past.position == len(whole) - 1
            assert (past.torn is None) == (end in durable)
        if end % 50 == 0:
            again = open_journal(folder)  # cuts it off
            await again.close()
            assert past_of(folder).torn is None


async def test_damage_to_what_was_durable_is_refused_with_its_place(tmp_path):
    journal = open_journal(tmp_path, settings=JournalConfig(commit_interval_s=0))
    await admit(journal, 0)
    await admit(journal, 1)
    await journal.close()
    data = bytearray(newest(tmp_path).read_bytes())
    frames = list(scan(memoryview(bytes(data))))
    begin = frames[1].offset
    data[begin + 40] ^= 1
    newest(tmp_path).write_bytes(data)
    with pytest.raises(JournalError, match=rf"00000001.log is damaged at byte {begin}.*copy"):
        read_journal(tmp_path)


async def test_damage_to_an_older_segment_is_refused_only_if_something_in_it_is_needed(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, *range(4))
    await admit(journal, *range(4, 8))
    await journal.close()
    first = sorted(tmp_path.glob("*.log"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JournalError, match=r"00000001\.log is damaged"):
        read_journal(tmp_path)
    first.write_bytes(whole)

    journal = open_journal(tmp_path)  # begins with a snapshot
    await train(journal, 1, *range(8))
    journal.ledger.cover(1, position=journal.position)
    await asyncio.wrap_future(journal._append(journal.ledger.snapshot()))
    await journal.close()
    first.write_bytes(whole[: len(whole) // 2])
    again = open_journal(tmp_path)
    assert again.ledger.totals == {"trained": 8}
    await again.close()


async def test_a_missing_segment_is_noticed(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(9):
        await admit(journal, number)
    await journal.close()
    files = sorted(tmp_path.glob("*.log"))
    assert len(files) >= 3
    files[1].unlink()
    with pytest.raises(JournalError, match="a part is missing"):
        read_journal(tmp_path)


async def test_what_a_checkpoint_covers_is_given_up_and_the_books_stay_complete(tmp_path):
    journal = open_journal(tmp_path)
    await admit(journal, 0)  # waits for ever
    for version in range(1, 40):
        numbers = range(2 * version - 1, 2 * version + 1)
        await admit(journal, *numbers)
        await train(journal, version, *numbers)
        if version % 5 == 0:
            await journal.settle()
            await journal.cover(version, position=journal.position)
            assert journal.num_bytes < 8 * SMALL.segment_bytes
    journal.closed(0, outcome="dropped", reason="stale")
    await journal.close()
    past = past_of(tmp_path)
    assert past.ledger.check() == []
    assert past.ledger.totals == {"trained": 78, "dropped: stale": 1}
    assert sorted(past.ledger.steps) == [36, 37, 38, 39]
    assert sum(path.stat().st_size for path in tmp_path.glob("*.log")) == journal.num_bytes


async def test_a_group_that_may_be_trained_once_more_outlives_its_step(tmp_path):
    journal = open_journal(tmp_path)
    for version in range(1, 20):
        await admit(journal, version - 1)
        await train(journal, version, version - 1)
        await journal.cover(version, position=journal.position, keep=[3])
    await journal.begun(20, fresh=[], replayed=[3])
    await journal.close()
    again = open_journal(tmp_path)
    assert [group.number for group in await again.groups([3])] == [3]
    await again.close()


async def test_a_disk_that_fails_is_told_to_everyone_who_waits(tmp_path):
    class FullSink:
        def __init__(self, path: Path) -> None:
            path.touch()

        def write(self, parts) -> None:
            if len(parts) > 1:
                raise OSError(28, "No space left on device")

        def sync(self) -> None: ...

        def close(self) -> None: ...

    journal = open_journal(tmp_path, open_sink=FullSink)
    journal.issued(0, draw=None)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"no space left.*make room"):
            await journal.admitted(make_group(0))
    with pytest.raises(JournalError):
        await journal.begun(1, fresh=[0])
    await journal.close()


async def test_who_stops_waiting_for_the_disk_does_not_disturb_the_writer(tmp_path):
    journal = open_journal(tmp_path, settings=JournalConfig(commit_interval_s=0.05))
    journal.issued(0, draw=None)
    waiting = asyncio.create_task(journal.admitted(make_group(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    journal.reopened(0)
    await journal.admitted(make_group(0))
    assert len(await journal.groups([0])) == 1
    await journal.close()


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_no_bytes_make_a_record_or_a_group_but_what_is_one(data):
    for decode in (decode_record, lambda view: decode_group(view, task=Task(prompt=""))):
        try:
            decode(memoryview(data))
        except JournalError:
            continue


@given(st.data())
@settings(max_examples=200)
def test_a_record_or_group_that_was_changed_anywhere_is_refused_or_still_one(data):
    group = encode_group(make_group(1, kept=True))
    record = ClosedRecord(number=4, outcome="failed", reason="score")
    payload = bytearray(b"".join(encode_record(record, content=group)))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    try:
        entry = decode_record(memoryview(bytes(payload)))
        decode_group(entry.content, task=Task(prompt=""))
    except JournalError:
        pass


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=300)
def test_any_bytes_are_a_segment_of_some_frames_and_an_end(data, begins_well):
    segment = memoryview(SEGMENT_MAGIC + data if begins_well else data)
    ends = [found.end for found in scan(segment)]
    assert all(end <= len(segment) for end in ends)
    assert is_torn(segment, ends[-1] if ends else 0) in (True, False)


@given(st.lists(st.binary(max_size=30), max_size=5), st.data())
def test_a_changed_byte_ends_the_segment_at_its_frame(payloads, data):
    frames = [b"".join(frame([p], position=i, synced=0)) for i, p in enumerate(payloads, start=1)]
    segment = bytearray(SEGMENT_MAGIC + b"".join(frames))
    assert [bytes(found.payload) for found in scan(memoryview(bytes(segment)))] == payloads
    at = data.draw(st.integers(0, len(segment) - 1))
    segment[at] ^= data.draw(st.integers(1, 255))
    damaged = list(scan(memoryview(bytes(segment))))
    assert all(found.end <= at for found in damaged)


async def test_a_record_of_no_known_kind_is_damage(tmp_path):
    snapshot = encode_record(
        LedgerSnapshot(version=0, next_number=0, open=(), waiting=(), totals={}),
    )
    odd = [b"\x03\x00\x00\x00", b"\x81\xa1a", b""]
    parts = [*frame(snapshot, position=1, synced=0), *frame(odd, position=2, synced=0)]
    (tmp_path / "00000001.log").write_bytes(SEGMENT_MAGIC + b"".join(parts))
    with pytest.raises(JournalError, match=r"00000001.log at byte \d+: What was read is not"):
        read_journal(tmp_path)


def test_the_books_notice_what_cannot_be():
    ledger = Ledger.begin(next_number=3, unfinished=[1])
    ledger.fold(IssuedRecord(number=3), position=1)
    ledger.fold(ClosedRecord(number=3, outcome="failed", reason="task"), position=2)
    assert ledger.check() == []
    ledger.fold(ClosedRecord(number=3, outcome="failed", reason="task"), position=3)
    assert ledger.check() == [
        "Number 3 was failed: task when it could not be.",
        "4 numbers were issued and 1 are open, which leaves 3, but 4 are accounted for.",
    ]
