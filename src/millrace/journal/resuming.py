"""Combines a journal and a checkpoint when a run resumes.

The checkpoint holds the state of the trainer; the journal what came after it. Where they do not
belong together, the checkpoint alone counts: its open tasks are issued again, with a warning.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.core.records import DEFAULT_POLICY
from millrace.journal.ledger import Ledger
from millrace.journal.reading import JournalHistory, read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run stands: what a checkpoint holds besides the trainer's own state."""

    version: int = 0  # of the policy; = finished steps
    policy: str = DEFAULT_POLICY
    next_number: int = 0  # first task number that was never issued
    unfinished: tuple[int, ...] = ()  # issued, and neither trained nor dropped nor failed
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])  # state of the task stream
    journal: int | None = None  # position of the journal; None = the run had no journal


def resume_history(folder: Path, checkpoint: Cursor) -> tuple[JournalHistory, list[str]]:
    """The history to continue from, and a warning for each problem."""
    history = read_journal(folder, verify=True)
    if history is None:
        return _from_checkpoint(checkpoint), []
    if (mismatch := _mismatch(history, checkpoint)) is not None:
        return _from_checkpoint(checkpoint), [
            f"The journal {mismatch}; episodes played since the checkpoint of step"
            f" {checkpoint.version} are played again."
        ]
    ledger = history.ledger
    begun = [version for version, step in ledger.steps.items() if not step.is_applied]
    history.proven_steps = tuple(version for version in begun if version <= checkpoint.version)
    for version in history.proven_steps:
        ledger.finish_step(version, was_skipped=False)
    return history, []


def _mismatch(history: JournalHistory, checkpoint: Cursor) -> str | None:
    """Why the two do not belong together; continues a sentence that begins "The journal"."""
    ledger, version = history.ledger, checkpoint.version
    if version > 0 and checkpoint.journal is None:
        return "does not know the newest checkpoint, which was made without a journal"
    if history.position < (checkpoint.journal or 0) or ledger.last_step < version:
        return "ends before the newest checkpoint"
    if version < ledger.covered_version:
        return f"begins after step {ledger.covered_version}, and that checkpoint is gone"
    needed = range(version + 1, ledger.last_step + 1)
    assert all(step in ledger.steps for step in needed), "steps are deleted in order"
    return None


def _from_checkpoint(checkpoint: Cursor) -> JournalHistory:
    return JournalHistory(
        ledger=Ledger.begin(
            version=checkpoint.version,
            next_number=checkpoint.next_number,
            unfinished=checkpoint.unfinished,
        ),
        position=checkpoint.journal or 0,
    )
