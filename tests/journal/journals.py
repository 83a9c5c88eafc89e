"""Journals for tests."""

from pathlib import Path

from millrace.config import JournalConfig
from millrace.core.records import Task
from millrace.journal import Journal, JournalHistory, Ledger, read_journal


def make_task(number: int, draw: int | None) -> Task:
    return Task(prompt=f"task {number}", columns={"draw": draw})


def open_journal(folder: Path, *, history: JournalHistory | None = None, **more) -> Journal:
    """Continues what lies in the folder, if anything does."""
    history = history or read_journal(folder) or JournalHistory(ledger=Ledger.begin())
    settings = {"task_of": make_task, "settings": JournalConfig(), "commit_interval_s": 0, **more}
    return Journal(folder, history=history, **settings)


def read_history(folder: Path) -> JournalHistory:
    history = read_journal(folder, verify=True, list_closed=True)
    assert history is not None
    return history
