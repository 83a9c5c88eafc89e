"""Thousands of damaged journals: each is read, or refused with JournalError."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fakes import make_group
from journals import open_journal
from mutations import FEW, MANY, costs_little, mutations

from millrace.core.completions import StreamedTokens
from millrace.core.errors import JournalError
from millrace.core.records import Completion, Task
from millrace.journal.database import NAME, decode_group, encode_group
from millrace.journal.reading import read_groups, read_journal, read_tokens


def completion() -> Completion:
    values = np.arange(5, dtype=np.int32)
    return Completion(
        tokens=values, logprobs=values / 2, versions=values, finish="stop", text="five tokens"
    )


@pytest.mark.parametrize("count", [FEW, MANY])
def test_damaged_groups_of_a_journal_are_decoded_or_refused(count):
    payload = encode_group(make_group(1, kept=True, routes=True))

    def read() -> None:
        for changed in mutations(payload, count=count, seed=5):
            with suppress(JournalError):
                decode_group(changed, task=Task(prompt=""))

    costs_little(read)


async def write_journal(folder: Path) -> None:
    """A journal with something in each of its tables."""
    journal = open_journal(folder)
    for number in range(6):
        journal.issue_task(number, draw=number)
        journal.record_solve_rate(number, solve_rate=0.5, draw=number)
    for number in range(4):
        await journal.admit_group(make_group(number))
    part = StreamedTokens(request="r", digest="d", member=0, start=0, part=completion())
    await journal.append_tokens(4, tries=0, tokens=[part])
    journal.close_task(5, outcome="dropped", reason="stale")
    await journal.begin_step(1, fresh=[0, 1])
    journal.finish_step(1, was_skipped=False)
    await journal.close()


def read_all(folder: Path, *, with_payloads: bool = True) -> None:
    history = read_journal(folder, list_closed=True)
    if history is not None:
        history.ledger.check()
    if with_payloads:
        read_groups(folder, [0, 3], tasks=[Task(prompt="")] * 2)
        read_tokens(folder, 4)


@pytest.mark.parametrize("count", [FEW // 5, MANY])
async def test_damaged_databases_of_a_journal_are_read_or_refused(tmp_path, count):
    await write_journal(tmp_path / "whole")
    read_all(tmp_path / "whole")
    whole = (tmp_path / "whole" / NAME).read_bytes()
    chance = random.Random(count)
    # Most of the file is empty pages and payloads with checksums: aim at the rest.
    used = [at for at in range(0, len(whole), 64) if any(whole[at : at + 64])]
    (tmp_path / NAME).write_bytes(whole)
    num_refused = 0
    with (tmp_path / NAME).open("r+b", buffering=0) as file:
        for index in range(count):
            at = chance.choice(used)
            (changed,) = mutations(whole[at : at + 64], count=1, seed=chance.getrandbits(32))
            file.seek(at)
            file.write(changed[:64])
            try:
                read_all(tmp_path, with_payloads=index % 4 == 0)
            except JournalError:
                num_refused += 1
            file.seek(at)
            file.write(whole[at : at + 64])
    assert count / 10 < num_refused < count
    read_all(tmp_path)
