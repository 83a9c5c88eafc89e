"""Finds where a run resumes: its newest good checkpoint, and what its journal has beyond that.

The checkpoint holds the state of the trainer; the journal what came after it. Where they do not
belong together, the checkpoint alone counts: its open tasks are issued again, with a warning.
Called by prepare(), before any worker starts. Of the run directory it changes nothing, except that
a newer checkpoint at checkpoint.path is downloaded into it.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ModelConfig, RunConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.core.records import DEFAULT_POLICY
from millrace.journal import JournalHistory, Ledger, read_journal
from millrace.models.directory import text_config
from millrace.monitoring.run_dir import RunDir
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints import directory
from millrace.training.checkpoints.store import CheckpointStore, newest_with_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where a run stands: what a checkpoint holds besides the trainer's own state."""

    version: int = 0  # finished steps; = that of the policy, if there is one
    policy: str = DEFAULT_POLICY
    next_number: int = 0  # first task number that was never issued
    unfinished: tuple[int, ...] = ()  # issued, and neither trained nor dropped nor failed
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])  # state of the task stream
    journal: int | None = None  # position of the journal; None = the run had no journal


class ResumePoint(NamedTuple):
    """Where a run begins, at its start or where an interrupted run left off: fields of
    PreparedRun."""

    checkpoint: Path | None
    cursor: Cursor
    history: JournalHistory | None  # what the journal holds; None = the run keeps no journal
    warnings: tuple[str, ...]


def has_started(config: RunConfig) -> bool:
    """Whether there is a run to resume, in run_dir or at checkpoint.path."""
    run_dir, url = RunDir(config.run_dir), config.checkpoint.path
    is_here = run_dir.exists or bool(run_dir.checkpoint_paths)
    return is_here or (url is not None and bool(CheckpointStore(url).steps()))


def has_finished(config: RunConfig) -> bool:
    """Whether the run has completed all of its steps."""
    run_dir = RunDir(config.run_dir)
    last = f"step_{config.trainer.steps}"
    return run_dir.is_finished and any(path.name == last for path in run_dir.checkpoint_paths)


def find_resume_point(config: RunConfig, stream: TaskStream, *, resume: bool) -> ResumePoint:
    """`stream` is moved to that point; it learns the solve rates known by then."""
    store = None if config.checkpoint.path is None else CheckpointStore(config.checkpoint.path)
    if resume:
        found, cursor = _newest_checkpoint(config, store)
    else:
        found, cursor = directory.FoundCheckpoint(refused=_check_unused(store)), Cursor()
    stream.restore(cursor.tasks)
    history, warnings = None, []
    if config.journal.is_on and resume:
        history, warnings = resume_history(RunDir(config.run_dir).journal, cursor)
    elif config.journal.is_on:
        history = JournalHistory(ledger=Ledger.begin())
    if history is not None:
        cursor = advance_cursor(cursor, history.ledger, stream)
    return ResumePoint(
        checkpoint=found.directory,
        cursor=cursor,
        history=history,
        warnings=(*found.refused, *warnings),
    )


def _check_unused(store: CheckpointStore | None) -> tuple[str, ...]:
    """Refuse to mix two runs in one store; a warning if the store cannot be read."""
    try:
        steps = [] if store is None else store.steps()
    except CheckpointError as error:
        return (f"{error} Checkpoints stay in run_dir meanwhile.",)
    if store is not None and steps:
        raise ConfigError(
            f"checkpoint.path = {store.url!r} already holds a checkpoint of step {steps[-1]};"
            " choose another path, or resume that run with --resume."
        )
    return ()


def _newest_checkpoint(
    config: RunConfig, store: CheckpointStore | None
) -> tuple[directory.FoundCheckpoint, Cursor]:
    """The newest good checkpoint; a run that has none yet starts from the beginning."""
    folder = Path(config.run_dir)
    found = (
        directory.newest_checkpoint(folder) if store is None else newest_with_store(folder, store)
    )
    checkpoint = found.directory
    if checkpoint is None:
        if found.refused:
            raise CheckpointError(
                f"{config.run_dir} has no checkpoint to resume from: {' '.join(found.refused)}"
                " Restore one from a copy, or start a new run in another run_dir."
            )
        run_dir = RunDir(config.run_dir)
        if run_dir.exists and run_dir.journal.exists():  # which names the policies of its tokens
            table = tomllib.loads(run_dir.config.read_text(encoding="utf-8"))
            check_same_policies(config, [*table.get("policies", {})], source=run_dir.path)
        return found, Cursor()
    state = directory.read_run_state(checkpoint)
    from millrace.models.lora.folders import check_same_kind  # only here: it imports torch

    check_same_kind(checkpoint, config.lora)
    check_same_base(checkpoint, config, saved=state.get("quantization"))
    check_same_model(checkpoint, config.model)
    directory.check_same_critic(checkpoint, has_critic=config.critic is not None)
    step = state["step"]
    is_over = RunDir(config.run_dir).is_finished or step > config.trainer.steps
    if is_over and step >= config.trainer.steps:
        raise ConfigError(
            f"{config.run_dir} has completed its {step} steps; to train further, raise"
            f" trainer.steps (now {config.trainer.steps})."
        )
    return found, Cursor(
        policy=state.get("policy", DEFAULT_POLICY),
        version=step,
        next_number=state["next_number"],
        unfinished=tuple(state["unfinished"]),
        tasks=state.get("tasks", {}),
        journal=state.get("journal"),
    )


def check_same_policies(config: RunConfig, saved: Sequence[str], *, source: Path) -> None:
    """Refuse to resume with other policies than those that were trained so far."""
    if list(saved) != list(config.policies):
        raise ConfigError(
            f"{str(source)!r} was trained with the policies {', '.join(saved) or 'none'}; to"
            " resume, keep these [policies], in this order."
        )


def check_same_model(checkpoint: Path, model: ModelConfig) -> None:
    """Refuse to resume from the weights of another model; an adapter is compared when it loads."""
    if not (checkpoint / "config.json").is_file():
        return
    saved, ours = (_described(str(path), model) for path in (checkpoint, model.path))
    for name in {**saved, **ours}:
        found, wanted = saved.get(name, "absent"), ours.get(name, "absent")
        if found != wanted:
            raise ConfigError(
                f"{str(checkpoint)!r} holds a model whose {name} is {found}, and that of"
                f" model.path = {model.path!r} is {wanted}; resume with the model that the run"
                " began with."
            )


def check_same_base(checkpoint: Path, config: RunConfig, *, saved: str | None) -> None:
    """Refuse to resume an adapter over other values of its base than it was trained with."""
    own = None if config.lora is None else config.lora.quantization
    if own != saved:
        raise ConfigError(
            f"{str(checkpoint)!r} was trained with lora.quantization = {saved!r}, and it is {own!r}"
            f" now; to resume, {'leave it out' if saved is None else 'set it to that'}."
        )


def _described(path: str, model: ModelConfig) -> dict[str, str]:
    """What weights of the model at `path` fit: its kind and sizes, and the shape of each weight."""
    from millrace.models.loading import empty_model  # only here: it imports torch

    trust = model.trust_remote_code
    config = text_config(path, trust_remote_code=trust)
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    described = {name: repr(getattr(config, name, None)) for name in names}
    for name, weight in empty_model(path, trust_remote_code=trust).named_parameters():
        described[name] = f"of shape {list(weight.shape)}"
    return described


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
