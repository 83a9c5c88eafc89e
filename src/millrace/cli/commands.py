"""The commands of the command line: each takes its parsed arguments, and may return an exit code.

Nothing heavy is imported before a command needs it.
"""

import argparse
import atexit
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from millrace.core.errors import ConfigError, Terminated

DONE, FAILED, WRONG_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 128 + signal.SIGTERM
PREEMPTED = os.EX_TEMPFAIL  # 75: schedulers start the command again
# What torchrun tells its processes. The ranks that a run starts must not take it for theirs.
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_\w+|TORCHELASTIC_\w+"
)
JOIN_MODULES = {  # by role
    "engine": "millrace.inference.worker",
    "trainer": "millrace.training.worker",
    "environment": "millrace.run.episodes.worker",
}


def demo(args: argparse.Namespace) -> None:
    from millrace.demo.run import run_demo

    run_demo(run_dir=args.run_dir, seed=args.seed)
    if args.json is not None:
        shutil.copyfile(args.run_dir / "summary.json", args.json)


def init(args: argparse.Namespace) -> None:
    from millrace.cli.starter import SEED, write_starter
    from millrace.models.directory import check_directory

    if args.model is not None:
        check_directory(args.model, setting="--model")

    def make(directory: Path) -> None:
        from millrace.demo.model import make_model  # only now: it imports torch

        print("Making a tiny model and training it briefly on examples (a minute or two) ...")
        make_model(directory, SEED)

    for path in write_starter(args.directory, make_model=make, model=args.model):
        print(f"wrote {path}")
    print(f"\nNext: millrace train {args.directory / 'run.toml'}")


def train(args: argparse.Namespace) -> int:
    if args.json is not None and not args.dry_run:
        raise ConfigError("--json FILE writes what --dry-run prints; add --dry-run.")
    if (begun := _begin_run(args)) is None:
        return DONE
    config, resume = begun
    from millrace.cluster.fork_server import shared_fork_server
    from millrace.monitoring.terminal.progress import make_progress

    memory: Any = None  # of a planned run
    progress = make_progress(config.monitoring.progress)
    progress.starting("run", "importing PyTorch")
    url = _start_dashboard(config.run_dir) if args.dashboard and not args.dry_run else None
    with contextlib.ExitStack() as stack:
        if not args.dry_run:
            stack.enter_context(shared_fork_server())  # it imports PyTorch at the same time
        try:
            from millrace.run import train as run
        finally:
            progress.stop()
        if args.dry_run:
            print(run.describe_placement(config, resume=resume, file=args.json))
            return DONE
        if url is not None:  # which was printed during the import
            print(url.readline().rstrip() or "warning: the dashboard did not start.")
        if args.config.name.endswith(".plan.toml"):
            from millrace.compare.runs import PeakMemory

            memory = stack.enter_context(PeakMemory(os.getpid()))
        code = _finish_run(lambda: run.train(config, resume=resume), run_dir=config.run_dir)
    if code == DONE and memory is not None:
        from millrace.plan.command import compared

        print("\n".join(compared(args.config, config.run_dir, memory=memory)))
    return code


def sft(args: argparse.Namespace) -> int:
    if (begun := _begin_run(args)) is None:
        return DONE
    config, resume = begun
    from millrace.run.sft.execute import sft as run

    return _finish_run(lambda: run(config, resume=resume), run_dir=config.run_dir)


def eval(args: argparse.Namespace) -> None:
    from rich.console import Console

    from millrace.config import parse_overrides
    from millrace.run.execution.evaluate import EvalOptions, evaluate_models, results_table

    settings = parse_overrides(args.settings)
    results = evaluate_models(EvalOptions(**_own_options(args), settings=settings))
    Console().print(results_table(results))


def _own_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options without those that main() adds to every command; repeated ones as tuples."""
    from_main = ("command", "run", "settings", "options")
    given = {name: value for name, value in vars(args).items() if name not in from_main}
    return {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}


def _begin_run(args: argparse.Namespace) -> tuple[Any, bool] | None:
    """The settings of the run, and whether it resumes; None if there is nothing to do."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # forget that torchrun started this process
        rank = int(os.environ["RANK"])
        for name in filter(TORCHRUN.fullmatch, list(os.environ)):
            del os.environ[name]
        if rank > 0:
            print(f"Rank {rank} of torchrun has nothing to do: rank 0 starts the trainer's ranks.")
            return None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))  # until the run handles it
    from millrace.config import load_config, parse_overrides

    is_sft = args.command == "sft"  # the number of its steps may depend on its examples
    preset = None if is_sft else args.settings.pop("preset", None)
    config = load_config(args.config, overrides=parse_overrides(args.settings), preset=preset)
    if not args.auto_resume:
        return config, args.resume
    from millrace.monitoring.run_dir import RunDir
    from millrace.run.resume import has_finished, has_started

    if RunDir(config.run_dir).is_finished if is_sft else has_finished(config):
        steps = "steps" if is_sft else f"{config.trainer.steps} steps"
        print(f"{config.run_dir} has completed its {steps}.")
        return None
    return config, has_started(config)


def _finish_run(run: Callable[[], object], *, run_dir: str) -> int:
    """Train, print the summary, and return the exit code."""
    from millrace.core.errors import Preempted

    try:
        run()
    except Preempted:
        print(f"stopped by SIGTERM; {interrupted_state(run_dir)}", file=sys.stderr)
        return PREEMPTED
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted_state(run_dir)}", file=sys.stderr)
        return INTERRUPTED
    from millrace.monitoring.report.summary import summary_text

    print(summary_text(run_dir))
    return DONE


def _start_dashboard(run_dir: str) -> IO[str]:
    """Start a process that shows the run and ends with this one; returns its output."""
    from millrace.cluster.parent_death import with_parent_death_signal

    command = [sys.executable, "-m", "millrace", "dashboard", run_dir, "--port", "0"]
    process = subprocess.Popen(
        with_parent_death_signal(command), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(process.terminate)
    os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # training comes first
    assert process.stdout is not None
    return process.stdout


def dashboard(args: argparse.Namespace) -> None:
    from millrace.cluster.event_loop import run_on_own_loop
    from millrace.dashboard.server import serve_dashboard

    with contextlib.suppress(Terminated):  # its ordinary end as a service
        run_on_own_loop(lambda: serve_dashboard(**_own_options(args)))


def presets(args: argparse.Namespace) -> None:
    from millrace.presets import preset_names, preset_text, preset_title, presets_json

    if args.json is not None:
        if args.json == "-":
            print(presets_json())
        else:
            Path(args.json).write_text(presets_json() + "\n")
        return
    if args.show is not None:
        print(preset_text(args.name or ""), end="")
        return
    for name in preset_names():
        print(f"{name:<14} {preset_title(name)}")


def compare(args: argparse.Namespace) -> int:
    from millrace.compare.runs import compare as compare_all

    return DONE if compare_all(args) else FAILED


def plan(args: argparse.Namespace) -> None:
    from millrace.plan.command import plan as plan_run

    plan_run(args)


def serve(args: argparse.Namespace) -> None:
    from millrace.config import parse_overrides
    from millrace.serving.settings import read_options

    options = read_options(args, parse_overrides(args.settings))
    from millrace.serving import command

    with contextlib.suppress(Terminated):  # its ordinary end as a service
        command.serve(options)


def interrupted_state(run_dir: str) -> str:
    """Where the files of an interrupted run are, and whether it can be resumed."""
    from millrace.monitoring.run_dir import RunDir

    saved = RunDir(run_dir).checkpoint_paths
    where = saved[-1].name if saved else "the start, with the groups in its journal"
    return f"metrics, trace and logs so far are in {run_dir}; --resume continues from {where}"


def join(args: argparse.Namespace) -> None:
    from millrace.cluster.join import host
    from millrace.cluster.join.ticket import read_ticket
    from millrace.core.errors import ConfigError

    ticket, module, devices = read_ticket(args.ticket), JOIN_MODULES[args.role], list[Any]()
    if args.role != "environment":
        from millrace.run.placement import host_devices

        found, visible = host_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [*host.own_gpus(args.device, found=found, visible=visible), found[-1]]
    elif args.device is not None:
        raise ConfigError("--device is for engines and ranks; remove it.")
    host.join(
        ticket,
        role=args.role,
        module=module,
        count=args.count,
        log_dir=args.log_dir,
        preload=("torch", "transformers", module),
        devices=devices,
        has_secrets=args.role == "environment",  # its tools may call services
        restarts=True,
    )


def env_worker(args: argparse.Namespace) -> None:
    join(args)


def launch(args: argparse.Namespace) -> None:
    from millrace.cli.launch.kubernetes import manifests
    from millrace.cli.launch.plan import plan_launch
    from millrace.cli.launch.slurm import slurm_script
    from millrace.core.errors import ConfigError

    plan = plan_launch(
        args.config,
        num_nodes=args.nodes,
        gpus=args.gpus,
        settings=args.settings,
        joins=args.scheduler == "slurm" or args.kind == "job",
    )
    if args.scheduler == "slurm":
        text = slurm_script(plan, options=args.options)
    elif args.options:
        raise ConfigError(f"{args.options[0]!r} after -- is an option of sbatch; remove it.")
    elif args.image is None or args.claim is None:
        raise ConfigError(
            "Pods need a container image with Millrace and a PersistentVolumeClaim that holds the"
            " folder of the settings; give --image IMAGE and --claim NAME."
        )
    else:
        text = manifests(plan, image=args.image, claim=args.claim, kind=args.kind)
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)


def engines(args: argparse.Namespace) -> None:
    from millrace.run.scaling import ask

    for name in ask(args.run_dir, add=args.add, remove=tuple(args.remove)):
        print(name)


def inspect(args: argparse.Namespace) -> None:
    from rich.console import Console

    from millrace.core.errors import JournalError, printable
    from millrace.monitoring.report.plots import render_plots
    from millrace.monitoring.report.summary import ledger_table, read_report, summary_text

    console, run_dir, number = Console(), args.run_dir, args.number
    if args.ledger or number is not None:
        report = read_report(run_dir)
        status = "" if number is None else f"{number}: {printable(report.status(number))}"
        shown = status or ledger_table(report)
        console.print(shown, highlight=False, markup=False)
        if troubles := report.check():
            raise JournalError(f"The ledger of {run_dir} does not add up: {' '.join(troubles)}")
        return
    print(summary_text(run_dir))
    for path in () if args.no_plots else render_plots(run_dir):
        console.print(f"drew {path}", highlight=False, soft_wrap=True)


def push(args: argparse.Namespace) -> None:
    from millrace.cli.push import push as push_checkpoint

    print(f"Pushed: {push_checkpoint(args)}")


def replay(args: argparse.Namespace) -> None:
    from millrace.cluster.event_loop import run_on_own_loop
    from millrace.environments.replay.command import replay as replay_all

    run_on_own_loop(lambda: replay_all(**_own_options(args)))


def bench(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"millrace.bench.{args.bench}")
    return module.main(args.arguments)
