"""Tokens of unfinished groups in the journal: kept while they are needed, and no longer."""

import asyncio
import contextlib

from fakes import make_completion, make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import open_journal

from millrace.core.completions import StreamedTokens, join_streamed
from millrace.core.errors import JournalError
from millrace.journal import Journal
from millrace.journal.database import decode_completion, encode_completion


def streamed(text: str, *, start: int = 0, member: int = 0) -> StreamedTokens:
    part = make_completion(text)
    return StreamedTokens(request="group 0/0", digest="d", member=member, start=start, part=part)


async def write(journal: Journal, number: int, *texts: str, tries: int = 0) -> None:
    for text in texts:
        await journal.append_tokens(number, tries=tries, tokens=[streamed(text)])


async def texts_of(journal: Journal, number: int) -> list[str]:
    return [one.part.text for one in await journal.read_tokens(number)]


async def reopened(journal: Journal) -> Journal:
    await journal.close()
    return open_journal(journal._folder)


async def test_tokens_of_running_tasks_are_read_in_order(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.issue_task(number, draw=None)
    await write(journal, 0, "a", "b")
    await write(journal, 1, "x")
    journal = await reopened(journal)
    await write(journal, 0, "c")
    journal = await reopened(journal)
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    assert await texts_of(journal, 1) == ["x"]
    assert await texts_of(journal, 7) == []
    await journal.close()


async def test_tokens_go_when_their_group_is_admitted_closed_or_tried_again(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(3):
        journal.issue_task(number, draw=None)
        await write(journal, number, "a", "b")
    await journal.admit_group(make_group(0))
    journal.close_task(1, outcome="dropped", reason="stale")
    journal.reopen_task(2)
    assert [await texts_of(journal, number) for number in range(3)] == [[], [], []]
    await write(journal, 2, "late")  # of the attempt that was given up
    await write(journal, 2, "new", tries=1)
    journal = await reopened(journal)
    assert [await texts_of(journal, number) for number in range(3)] == [[], [], ["new"]]
    assert journal.ledger.tries == {2: 1}
    await journal.close()


async def test_tries_are_counted_until_the_task_is_closed(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    journal.reopen_task(0)
    journal.reopen_task(0)
    journal = await reopened(journal)
    assert journal.ledger.tries == {0: 2}
    journal.close_task(0, outcome="dropped", reason="stale")
    assert journal.ledger.tries == {}
    await journal.close()


async def test_tokens_of_a_task_that_runs_long_outlive_checkpoints(tmp_path):
    journal = open_journal(tmp_path)
    journal.issue_task(0, draw=None)
    await write(journal, 0, "a", "b")
    sizes = []
    for version in range(1, 30):
        journal.issue_task(version, draw=None)
        await write(journal, version, *("x" * 60 for _ in range(5)))
        await journal.admit_group(make_group(version))
        await journal.begin_step(version, fresh=[version])
        journal.finish_step(version, was_skipped=False)
        await journal.discard_covered(version, position=journal.position)
        sizes.append(journal.num_bytes)
    await write(journal, 0, "c")
    assert sizes[-1] <= 2 * sizes[0]
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    journal = await reopened(journal)
    assert await texts_of(journal, 0) == ["a", "b", "c"]
    await journal.close()


async def test_checkpoints_spare_groups_whose_admission_is_under_way(tmp_path):
    journal = open_journal(tmp_path)
    for number in range(12):
        journal.issue_task(number, draw=None)
    admitting = [asyncio.create_task(journal.admit_group(make_group(n))) for n in range(6)]
    await asyncio.sleep(0)
    covering = asyncio.create_task(journal.discard_covered(0, position=journal.position))
    await asyncio.gather(*admitting, covering)
    for number in range(6, 12):
        await journal.admit_group(make_group(number))
    await journal.discard_covered(0, position=journal.position)
    assert [group.number for group in await journal.read_groups(range(12))] == list(range(12))
    await journal.close()


def test_tokens_without_their_predecessors_are_left_out():
    parts = [
        streamed("ab"),
        streamed("c", start=5),
        streamed("d", start=2),
        streamed("e", start=1, member=1),
    ]
    known = join_streamed(parts)
    assert set(known) == {("group 0/0", 0)}
    assert known["group 0/0", 0].part.tokens.tolist() == [ord(c) for c in "abd"]


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_arbitrary_bytes_are_a_completion_or_an_error(data):
    with contextlib.suppress(JournalError):
        decode_completion(data)


@given(st.data())
@settings(max_examples=200)
def test_a_completion_with_a_changed_byte_is_a_completion_or_an_error(data):
    payload = bytearray(encode_completion(make_completion("abc")))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(JournalError):
        decode_completion(bytes(payload))
