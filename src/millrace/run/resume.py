"""Where a run goes on: its newest good checkpoint, and what its journal says beyond that.

Called by prepare(), before any worker starts.
"""

from dataclasses import replace
from pathlib import Path

from millrace.config import RunConfig
from millrace.controller.controller import Cursor
from millrace.core.errors import CheckpointError, ConfigError
from millrace.journal import JournalHistory, Ledger
from millrace.journal.resuming import Checkpointed, recall, reissued_numbers
from millrace.models.lora.folders import check_same_kind
from millrace.monitoring.run_dir import RunDir
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.directory import (
    Found,
    check_same_critic,
    newest_checkpoint,
    read_run_state,
)


def resume_point(config: RunConfig) -> tuple[Found, Cursor]:
    """The newest good checkpoint; a run that never wrote one starts from the beginning."""
    found = newest_checkpoint(Path(config.run_dir))
    checkpoint = found.directory
    if checkpoint is None:
        if found.refused:
            raise CheckpointError(
                f"{config.run_dir} holds no checkpoint to go on from: {' '.join(found.refused)}"
                " Bring one back from a copy, or start anew in another run_dir."
            )
        return found, Cursor()
    state = read_run_state(checkpoint)
    check_same_kind(checkpoint, config.lora)
    check_same_critic(checkpoint, has_critic=config.critic is not None)
    is_over = RunDir(config.run_dir).is_finished or state["version"] > config.trainer.steps
    if is_over and state["version"] >= config.trainer.steps:
        raise ConfigError(
            f"{config.run_dir} already did its {state['version']} steps; to go on, raise"
            f" trainer.steps (now {config.trainer.steps})."
        )
    return found, Cursor(
        version=state["version"],
        next_number=state["next_number"],
        unfinished=tuple(state["unfinished"]),
        tasks=state.get("tasks", {}),
        journal=state.get("journal"),
    )


def past_of(
    config: RunConfig, cursor: Cursor, *, resume: bool
) -> tuple[JournalHistory | None, tuple[str, ...]]:
    """Where the journal goes on, if the run has one."""
    if not config.journal.enabled:
        return None, ()
    if not resume:
        return JournalHistory(ledger=Ledger.begin()), ()
    checkpoint = Checkpointed(
        version=cursor.version,
        next_number=cursor.next_number,
        unfinished=cursor.unfinished,
        position=cursor.journal,
    )
    past, doubts = recall(RunDir(config.run_dir).journal, checkpoint)
    return past, tuple(doubts)


def continued(cursor: Cursor, ledger: Ledger, stream: TaskStream) -> Cursor:
    """Where the run stands by its journal; the stream learns what it was told since the
    checkpoint."""
    for position, observed in ledger.observed:
        if position > (cursor.journal or 0):
            stream.remember(observed.number, observed.draw)
            stream.observe(observed.number, observed.solve_rate)
            stream.finish(observed.number)
    reissued = reissued_numbers(ledger)
    for number in ledger.open & ledger.draws.keys():
        stream.remember(number, ledger.draws[number])
    return replace(cursor, next_number=ledger.next_number, unfinished=tuple(reissued))
