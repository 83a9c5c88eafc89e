"""The queries and the reader of docs/journal.md work on a real journal."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fakes import make_completion, make_group

from millrace.config import JournalConfig
from millrace.core.completions import StreamedTokens
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger
from millrace.journal.database import FORMAT_VERSION, TABLES

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
async def folder(tmp_path) -> Path:
    journal = Journal(
        tmp_path,
        history=JournalHistory(ledger=Ledger.begin()),
        task_of=lambda number, draw: Task(prompt=""),
        settings=JournalConfig(),
    )
    for number in range(6):
        journal.issue_task(number, draw=None)
    for number in range(4):
        await journal.admit_group(make_group(number))
    await journal.begin_step(1, fresh=[0, 1])
    journal.finish_step(1, was_skipped=False)
    await journal.begin_step(2, fresh=[2])
    journal.close_task(4, outcome="dropped", reason="stale")
    part = make_completion("abc")
    tokens = StreamedTokens(request="group 5/0", digest="d", member=0, start=0, part=part)
    await journal.append_tokens(5, tries=0, tokens=[tokens])
    await journal.close()
    return tmp_path


def test_queries_run_on_a_journal(folder):
    with closing(sqlite3.connect(folder / "journal.db")) as db:
        found = [sorted(db.execute(query).fetchall(), key=repr) for query in blocks("sql")]
    by_status, trained, redone, saved = found
    assert {(status, reason): n for status, reason, n in by_status} == {
        ("dropped", "stale"): 1,
        ("running", None): 1,
        ("trained", None): 2,
        ("training", None): 1,
        ("waiting", None): 1,
    }
    assert trained == [(1, "0,1")]
    assert [(version, status, n) for version, status, n, _ in redone] == [
        (1, "applied", 2),
        (2, "begun", 1),
    ]
    assert saved == [(5, "group 5/0", 0, 3)]


def test_reader_decodes_groups_without_millrace(folder, monkeypatch, capsys):
    (program,) = blocks("python")
    assert "millrace" not in program
    monkeypatch.chdir(folder)
    exec(program, {})
    group = make_group(0)
    lengths = [len(rollout.tokens) for rollout in group.rollouts]
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"0 {[score.total for score in group.scores]} {lengths}"
    assert len(rest) == 3


def test_every_table_and_column_is_described(folder):
    with closing(sqlite3.connect(folder / "journal.db")) as db:
        for table in ("meta", *TABLES):
            assert f"`{table}`" in PAGE
            for _, column, *_ in db.execute(f"PRAGMA table_info({table})"):
                assert f"`{column}`" in PAGE or table == "meta"
    assert f"The format version is {FORMAT_VERSION}" in PAGE
