"""Finds where a run resumes: its newest good checkpoint, and what its journal has beyond that.

Called by prepare(), before any worker starts. Reads only.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from millrace.config import RunConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.core.records import DEFAULT_POLICY
from millrace.journal import JournalHistory, Ledger
from millrace.journal.resuming import Cursor, resume_history
from millrace.monitoring.run_dir import RunDir
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.directory import (
    FoundCheckpoint,
    check_same_critic,
    newest_checkpoint,
    read_run_state,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where a run begins: at its start, or where an interrupted run left off."""

    checkpoint: Path | None
    cursor: Cursor
    history: JournalHistory | None  # what the journal holds; None = the run keeps no journal
    warnings: tuple[str, ...]


def find_resume_point(config: RunConfig, stream: TaskStream, *, resume: bool) -> ResumePoint:
    """`stream` is moved to that point; it learns the solve rates known by then."""
    found, cursor = _newest_checkpoint(config) if resume else (FoundCheckpoint(), Cursor())
    stream.restore(cursor.tasks)
    history, warnings = _journal_history(config, cursor, resume=resume)
    if history is not None:
        cursor = advance_cursor(cursor, history.ledger, stream)
    return ResumePoint(
        checkpoint=found.directory,
        cursor=cursor,
        history=history,
        warnings=(*found.refused, *warnings),
    )


def _newest_checkpoint(config: RunConfig) -> tuple[FoundCheckpoint, Cursor]:
    """The newest good checkpoint; a run that has none yet starts from the beginning."""
    found = newest_checkpoint(Path(config.run_dir))
    checkpoint = found.directory
    if checkpoint is None:
        if found.refused:
            raise CheckpointError(
                f"{config.run_dir} has no checkpoint to resume from: {' '.join(found.refused)}"
                " Restore one from a copy, or start a new run in another run_dir."
            )
        return found, Cursor()
    state = read_run_state(checkpoint)
    from millrace.models.lora.folders import check_same_kind  # only here: it imports torch

    check_same_kind(checkpoint, config.lora)
    check_same_critic(checkpoint, has_critic=config.critic is not None)
    is_over = RunDir(config.run_dir).is_finished or state["version"] > config.trainer.steps
    if is_over and state["version"] >= config.trainer.steps:
        raise ConfigError(
            f"{config.run_dir} has completed its {state['version']} steps; to train further, raise"
            f" trainer.steps (now {config.trainer.steps})."
        )
    return found, Cursor(
        policy=state.get("policy", DEFAULT_POLICY),
        version=state["version"],
        next_number=state["next_number"],
        unfinished=tuple(state["unfinished"]),
        tasks=state.get("tasks", {}),
        journal=state.get("journal"),
    )


def _journal_history(
    config: RunConfig, cursor: Cursor, *, resume: bool
) -> tuple[JournalHistory | None, tuple[str, ...]]:
    """What the journal continues from, and warnings."""
    if not config.journal.is_on:
        return None, ()
    if not resume:
        return JournalHistory(ledger=Ledger.begin()), ()
    history, warnings = resume_history(RunDir(config.run_dir).journal, cursor)
    return history, tuple(warnings)


def advance_cursor(cursor: Cursor, ledger: Ledger, stream: TaskStream) -> Cursor:
    """The cursor at the end of the journal, which is ahead of the checkpoint."""
    for one in ledger.observations:
        if one.position > (cursor.journal or 0):
            stream.remember(one.number, one.draw)
            stream.observe(one.number, one.solve_rate)
            stream.finish(one.number)
    for number in ledger.open & ledger.draws.keys():
        stream.remember(number, ledger.draws[number])
    return replace(cursor, next_number=ledger.next_number, unfinished=tuple(sorted(ledger.running)))
