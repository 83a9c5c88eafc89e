"""`millrace eval`: held-out evaluation of a model, or of the checkpoints of a run.

Engines, scorers and environments are those of a run, without a trainer. What the evaluation writes
besides its results is in a temporary folder.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text

from millrace.cluster.fork_server import shared_fork_server
from millrace.config import RunConfig, load_config
from millrace.controller.evaluation import EvalSet, Evaluation
from millrace.core.errors import ConfigError, printable
from millrace.monitoring.run_dir import RunDir, write_atomically
from millrace.monitoring.terminal.snapshot import RunGauges
from millrace.run.execution.execute import RunProcesses, StartedRun, execute
from millrace.run.prepare import PreparedRun, prepare
from millrace.run.resume import Cursor

LAST, ALL = "last", "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    source: Path  # a model, by folder or hub name, a run directory, or a TOML file
    tasks: str | None = None  # path; None = evaluate.path of the settings
    scorers: tuple[str, ...] = ()  # instead of those of the settings
    model: str | None = None  # instead of that of the settings
    checkpoints: str = LAST  # of a run directory: "last", "all" or steps with commas
    samples: int | None = None
    temperature: float | None = None
    json: Path | None = None  # file for the results
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further ones, dotted


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """The columns of the table and of the JSON file."""

    model: str
    step: int | None  # of a checkpoint
    accuracy: float  # share of solved episodes; those of failed tasks are not solved
    standard_error: float | None  # of the accuracy, over tasks; None for one task
    reward_mean: float | None  # of scored episodes
    pass_at: dict[int, float]  # by k
    num_tasks: int
    num_failed: int
    samples: int


def evaluate_models(options: EvalOptions) -> list[EvalResult]:
    config, checkpoints = read_source(options)
    results: list[EvalResult] = []
    with shared_fork_server():
        for step, path in checkpoints.items():
            with tempfile.TemporaryDirectory(prefix="millrace-eval-") as folder:
                own = config.updated(run_dir=folder)
                evaluation = execute(own, kind=EvalRun, step=step, checkpoint=path)
            model = str(path or config.model.path)
            results.append(_result(evaluation, model=model, step=step if path else None))
    if options.json is not None:
        rows = [asdict(result) for result in results]
        write_atomically(options.json, json.dumps(rows, indent=2) + "\n")
    return results


def read_source(options: EvalOptions) -> tuple[RunConfig, dict[int, Path | None]]:
    """The settings, and the checkpoints by step; one of None is the model of the settings."""
    source, folder = options.source, RunDir(options.source)
    overrides: dict[str, Any] = {
        "checkpoint.path": None,
        "tasks.epochs": None,
        "journal.max_bytes": 0,
        "evaluate.engines": 0,
        "evaluate.max_tasks": 2**31,
        "placement.trainer": "cpu",  # there is none, and no GPU is kept for it
        "trainer.ranks": 1,
        "trainer.remote": 0,
        "trainer.mesh": {"dp_replicate": 1, "dp_shard": "auto", "cp": 1, "tp": 1, "ep": 1},
        "tracker": (),
    }
    optional = {"evaluate.samples": options.samples, "evaluate.temperature": options.temperature}
    overrides |= {key: value for key, value in optional.items() if value is not None}
    if options.tasks is not None:
        overrides["evaluate"] = {"path": options.tasks, "generator": None}
    if options.scorers:
        overrides["scorers"] = options.scorers
    if options.model is not None:
        overrides |= {"model.path": options.model, "lora": None}
    overrides |= options.settings
    is_run = folder.config.is_file()
    if is_run or source.is_file() or source.suffix == ".toml":
        settings: Any = folder.config if is_run else source
    else:
        # A run needs tasks to train on; they are only read here.
        settings = {"model": str(source), "tasks": {"path": options.tasks}}
        if options.tasks is None:
            raise ConfigError(f"{str(source)!r} is a model; add --tasks FILE, and a --scorer.")
    config = load_config(settings, overrides=overrides)
    if not config.evaluate.is_named:
        raise ConfigError("There are no held-out tasks; add --tasks FILE, or set evaluate.path.")
    if not is_run or options.model is not None:
        return config, {0: None}
    found = {int(path.name.removeprefix("step_")): path for path in folder.checkpoint_paths}
    return config, {step: found[step] for step in _chosen(options.checkpoints, sorted(found))}


def _chosen(wanted: str, steps: Sequence[int]) -> Sequence[int]:
    if not steps:
        raise ConfigError("The run has no checkpoint yet; wait for one, or give --model PATH.")
    if wanted in (LAST, ALL):
        return steps if wanted == ALL else steps[-1:]
    numbers = [int(part) if part.strip().isdecimal() else -1 for part in wanted.split(",")]
    for number in numbers:
        if number not in steps:
            known = ", ".join(map(str, steps))
            raise ConfigError(f"--checkpoints {wanted}: choose {LAST}, {ALL}, or steps of {known}.")
    return numbers


def _prepare(
    config: RunConfig, *, step: int, checkpoint: Path | None, resume: bool = False
) -> PreparedRun:
    prepared = prepare(config, resume=resume, trains=False)
    return replace(prepared, checkpoint=checkpoint, cursor=Cursor(version=step))


class EvalRun(RunProcesses):
    """A run without a trainer, which evaluates its held-out tasks once."""

    prepare: ClassVar = staticmethod(_prepare)
    trains: ClassVar = False
    _evaluation: Evaluation | None = None

    async def run(self) -> Evaluation:
        await self._run()
        assert self._evaluation is not None, "there are held-out tasks"
        return self._evaluation

    async def _work(self, started: StartedRun) -> RunGauges:
        version = self.prepared.cursor.version
        eval_set = EvalSet(
            tasks=self.prepared.held_out,
            config=self.prepared.config,
            player=started.player,
            engines=started.workers.engines,
            scorers=started.scorers,
            monitor=self._monitor,
        )
        async with asyncio.TaskGroup() as activities:
            supervision = activities.create_task(started.workers.worker_pool.run())
            self._evaluation = await eval_set.evaluate(version)
            supervision.cancel()
        return RunGauges(version=version)


def _result(evaluation: Evaluation, *, model: str, step: int | None) -> EvalResult:
    solved_at = evaluation.solved_at
    rates = [group.solve_rate(solved_at) for group in evaluation.groups]
    rates += [0.0] * evaluation.num_failed
    rewards = [score.total for group in evaluation.groups for score in group.scores]
    return EvalResult(
        model=model,
        step=step,
        accuracy=evaluation.accuracy,
        standard_error=stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else None,
        reward_mean=fmean(rewards) if rewards else None,
        pass_at=evaluation.pass_at if evaluation.samples > 1 else {},
        num_tasks=evaluation.num_tasks,
        num_failed=evaluation.num_failed,
        samples=evaluation.samples,
    )


def results_table(results: Sequence[EvalResult]) -> Table:
    table = Table(title="Held-out evaluation", title_justify="left")
    passes = [f"pass@{k}" for k in results[0].pass_at]
    for name in ("model", "accuracy", "± s.e.", "mean reward", *passes, "tasks", "failed"):
        table.add_column(name)
    for found in results:
        name = found.model if found.step is None else Path(found.model).name
        numbers = (found.accuracy, found.standard_error, found.reward_mean, *found.pass_at.values())
        texts = ("" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(Text(printable(name)), *texts, str(found.num_tasks), str(found.num_failed))
    return table
