"""How a journal and a checkpoint go together when a run goes on.

The checkpoint says where the trainer stands; the journal what came after. Where the two do not
meet, the checkpoint alone counts: its numbers are issued again, and the reason is said.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millrace.journal.ledger import Ledger
from millrace.journal.reading import JournalHistory, read_journal
from millrace.journal.records import AppliedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed:
    """Where a checkpoint stood."""

    version: int = 0
    next_number: int = 0
    unfinished: Iterable[int] = ()
    position: int | None = None  # of the journal; None = it was made without one


def recall(folder: Path, checkpoint: Checkpointed) -> tuple[JournalHistory, list[str]]:
    """The past to go on behind, and a sentence for each thing that is not as it should be."""
    past = read_journal(folder)
    if past is None:
        return _anew(checkpoint), []
    if (mismatch := _mismatch(past, checkpoint)) is not None:
        return _anew(checkpoint), [
            f"The journal {mismatch}; what was played since the checkpoint of step"
            f" {checkpoint.version} is played again."
        ]
    for version, step in past.ledger.steps.items():
        if version <= checkpoint.version and not step.is_applied:
            past.ledger.fold(AppliedRecord(version=version), position=past.position)
    if past.torn is None:
        return past, []
    return past, [
        f"The last {past.torn.num_bytes} bytes of the journal, which a crash cut short, are left"
        " out; nobody was told that they were durable."
    ]


def redone_numbers(ledger: Ledger, *, after: int) -> list[int]:
    """Of the groups that are trained for the first time in steps beyond a version."""
    return [n for v, step in ledger.steps.items() if v > after for n in step.begun.fresh]


def reissued_numbers(ledger: Ledger) -> list[int]:
    """What is open and has to be played again."""
    return sorted(ledger.playing)


def _mismatch(past: JournalHistory, checkpoint: Checkpointed) -> str | None:
    """Goes on from "The journal ..."."""
    ledger, version = past.ledger, checkpoint.version
    if version > 0 and checkpoint.position is None:
        return "knows nothing of the newest checkpoint, which was made without one"
    if past.position < (checkpoint.position or 0) or ledger.last_begun < version:
        return "ends before the newest checkpoint"
    if version < ledger.version:
        return f"begins after step {ledger.version}, and that checkpoint is gone"
    needed = range(version + 1, ledger.last_begun + 1)
    assert all(step in ledger.steps for step in needed), "they are given up in order"
    return None


def _anew(checkpoint: Checkpointed) -> JournalHistory:
    return JournalHistory(
        ledger=Ledger.begin(
            version=checkpoint.version,
            next_number=checkpoint.next_number,
            unfinished=checkpoint.unfinished,
        )
    )
