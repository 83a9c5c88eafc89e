"""The commands of the command line: each takes its parsed arguments, and may return an exit code.

Nothing heavy is imported before a command needs it.
"""

import argparse
import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.run.train import RunResult

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
# What torchrun tells its processes. The ranks that a run starts must not take it for theirs.
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_\w+|TORCHELASTIC_\w+"
)
FROM_MAIN = ("command", "run", "settings")  # what main() adds to the options of every command


def demo(args: argparse.Namespace) -> None:
    from millrace.demo.run import run_demo

    run_demo(run_dir=args.run_dir, seed=args.seed)
    if args.json is not None:
        shutil.copyfile(args.run_dir / "summary.json", args.json)


def init(args: argparse.Namespace) -> None:
    from millrace.cli.starter import SEED, write_starter

    def make(directory: Path) -> None:
        from millrace.demo.model import make_model  # only now: it imports torch

        print("Making a tiny model and training it briefly on examples, half a minute ...")
        make_model(directory, SEED)

    for path in write_starter(args.directory, make_model=make, model=args.model):
        print(f"wrote {path}")
    print(f"\nNext: millrace train {args.directory / 'run.toml'}")


def train(args: argparse.Namespace) -> int:
    if (rank := _leave_torchrun()) > 0:
        print(f"Rank {rank} of torchrun has nothing to do: rank 0 starts the trainer's ranks.")
        return DONE
    from millrace.config import load_config, parse_override

    overrides = {key: parse_override(key, value) for key, value in args.settings.items()}
    config = load_config(args.config, overrides=overrides)
    from millrace.monitoring.terminal.progress import make_progress

    progress = make_progress(config.monitoring.progress)
    progress.starting("run", "importing PyTorch")
    try:
        from millrace.run import train as run
    finally:
        progress.stop()
    if args.dry_run:
        print(run.describe_placement(config, resume=args.resume))
        return DONE
    try:
        result = run.train(config, resume=args.resume)
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted_state(config.run_dir)}", file=sys.stderr)
        return INTERRUPTED
    print(_outcome(result))
    return DONE


def _leave_torchrun() -> int:
    """Forget that torchrun started this process; returns its rank, 0 without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    rank = int(os.environ["RANK"])
    for name in filter(TORCHRUN.fullmatch, list(os.environ)):
        del os.environ[name]
    return rank


def serve(args: argparse.Namespace) -> None:
    from millrace.config import parse_override
    from millrace.serving.settings import read_options

    options = read_options(
        args, {key: parse_override(key, value) for key, value in args.settings.items()}
    )
    from millrace.serving import command

    command.serve(options)


def interrupted_state(run_dir: str) -> str:
    """Where the files of an interrupted run are, and whether it can be resumed."""
    from millrace.monitoring.run_dir import RunDir

    saved = RunDir(run_dir).checkpoint_paths
    where = saved[-1].name if saved else "the start, with the groups in its journal"
    return f"metrics, trace and logs so far are in {run_dir}; --resume continues from {where}"


def _outcome(result: "RunResult") -> str:
    from millrace.monitoring.terminal.text import duration

    lines = [f"trained {result.steps} steps in {duration(result.seconds)}"]
    if result.accuracy_before is not None and result.accuracy_after is not None:
        change = f"{result.accuracy_before:.3f} → {result.accuracy_after:.3f}"
        lines.append(f"held-out accuracy  {change}")
    lines.append(f"checkpoint         {result.checkpoint}")
    lines.append(f"everything else    {result.run_dir} (see `millrace inspect {result.run_dir}`)")
    return "\n".join(lines)


def join(args: argparse.Namespace) -> None:
    from millrace.cluster.join import host
    from millrace.cluster.join.ticket import read_ticket

    host.join(
        read_ticket(args.ticket),
        module="millrace.inference.worker",
        count=args.count,
        log_dir=args.log_dir,
        preload=("torch", "transformers", "millrace.inference.worker"),
    )


def _ledger(run_dir: Path, console: Any, *, number: int | None) -> None:
    from millrace.core.errors import JournalError
    from millrace.monitoring.report.ledger import ledger_table, read_report

    report = read_report(run_dir)
    shown = ledger_table(report) if number is None else f"{number}: {report.status(number)}"
    console.print(shown, highlight=False, markup=False)
    if troubles := report.check():
        raise JournalError(f"The ledger of {run_dir} does not add up: {' '.join(troubles)}")


def engines(args: argparse.Namespace) -> None:
    from millrace.run.scaling import ask

    for name in ask(args.run_dir, add=args.add, remove=tuple(args.remove)):
        print(name)


def inspect(args: argparse.Namespace) -> None:
    from rich.console import Console

    from millrace.monitoring.report.plots import render_plots
    from millrace.monitoring.report.summary import summary_table

    console = Console()
    if args.ledger or args.number is not None:
        _ledger(args.run_dir, console, number=args.number)
        return
    console.print(summary_table(args.run_dir), highlight=False)
    if not args.no_plots:
        for path in render_plots(args.run_dir):
            console.print(f"drew {path}", highlight=False, soft_wrap=True)


def replay(args: argparse.Namespace) -> None:
    from millrace.cluster.event_loop import run_on_own_loop
    from millrace.environments.replay.command import ReplayOptions
    from millrace.environments.replay.command import replay as replay_all

    given = {name: value for name, value in vars(args).items() if name not in FROM_MAIN}
    given |= {"scores": tuple(args.scores), "tool_results": tuple(args.tool_results)}
    run_on_own_loop(lambda: replay_all(ReplayOptions(**given)))


def bench(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"millrace.bench.{args.bench}")
    return module.main(args.arguments)
