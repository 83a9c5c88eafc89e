"""Combines a journal and a checkpoint when a run resumes.

The checkpoint holds the state of the trainer; the journal what came after it. Where they do not
belong together, the checkpoint alone counts: its open tasks are issued again, with a warning.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millrace.journal.ledger import Ledger
from millrace.journal.reading import JournalHistory, read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What a checkpoint says about the run."""

    version: int = 0
    next_number: int = 0
    unfinished: Iterable[int] = ()
    position: int | None = None  # of the journal; None = the run had no journal


def resume_history(folder: Path, checkpoint: CheckpointState) -> tuple[JournalHistory, list[str]]:
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


def _mismatch(history: JournalHistory, checkpoint: CheckpointState) -> str | None:
    """Why the two do not belong together; continues a sentence that begins "The journal"."""
    ledger, version = history.ledger, checkpoint.version
    if version > 0 and checkpoint.position is None:
        return "does not know the newest checkpoint, which was made without a journal"
    if history.position < (checkpoint.position or 0) or ledger.last_step < version:
        return "ends before the newest checkpoint"
    if version < ledger.covered_version:
        return f"begins after step {ledger.covered_version}, and that checkpoint is gone"
    needed = range(version + 1, ledger.last_step + 1)
    assert all(step in ledger.steps for step in needed), "steps are deleted in order"
    return None


def _from_checkpoint(checkpoint: CheckpointState) -> JournalHistory:
    return JournalHistory(
        ledger=Ledger.begin(
            version=checkpoint.version,
            next_number=checkpoint.next_number,
            unfinished=checkpoint.unfinished,
        ),
        position=checkpoint.position or 0,
    )
