"""The command line: demo, init, train, compare, plan, serve, join, launch, inspect, bench, ...

Promise: every error is one sentence on stderr and an exit code; only the traceback of a failed
worker follows it. Nothing heavy is imported before a command needs it.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import millrace
from millrace.bench import BENCHES
from millrace.cli import commands as run
from millrace.cli import options
from millrace.cli.commands import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    TERMINATED,
    WRONG_INPUT,
)
from millrace.core import errors
from millrace.core.files import private_files
from millrace.serving.options import SERVE, SERVE_MORE, add_arguments

INTRODUCTION = """\
Asynchronous reinforcement-learning post-training of language models. Engines generate
while the trainer steps, and every token records the version of the weights that sampled it.
"""

START_HERE = """\
start here:
  millrace demo                    train a tiny model on this machine, to see that it works
  millrace init my-run             write settings, a reward function, tasks and a tiny model
                                   (--model PATH: use your own model instead)
  millrace train my-run/run.toml   train with these settings
  millrace inspect my-run/run      show a summary and draw plots
  millrace dashboard my-run/run    look into the run with a browser, also while it trains

exit codes:
  0 success   1 the run failed   2 wrong setting, argument or input
  75 stopped by SIGTERM, as schedulers do; the run can resume   130 interrupted by Ctrl-C
  143 another command was stopped by SIGTERM (serve and dashboard: 0)
"""

DEMO = """\
Make a small transformer that sorts digits badly, and train it with asynchronous reinforcement
learning on the CPU until it sorts well. The demo takes a few minutes and downloads nothing. At the
end it prints the held-out accuracy before and after, and where to find the results. It replaces an
earlier demo in the same run directory.
"""

INIT = """\
Write a project into DIR (default: this folder) that trains as it is:

  run.toml        the settings that you are likely to change, with comments
  rewards.py      an example of a reward function
  tasks.jsonl     tasks to train on, one per line: a prompt, and columns for the reward function
  heldout.jsonl   tasks to measure accuracy
  model/          a tiny model and its tokenizer

With --model PATH, run.toml names that model (a directory or a hub name), and no model is made.
Existing files are never overwritten.

Then run: millrace train DIR/run.toml
"""

PRESETS = """\
List the designs of other libraries, or show the settings of one, with what cannot be the same.
`millrace train RUN.toml --preset NAME` applies one. Settings of RUN.toml and of the command line
win, and each axis that they override is printed.
"""

JOIN = """\
Add engines, ranks of the trainer, or workers of the environment of this host to a run whose
controller is on another host. The run writes a ticket (setting cluster.ticket); copy it here, for
example over ssh. It is a secret: this command refuses a ticket that other users can read.

Millrace, PyTorch, transformers and Python must have the versions of the run. Workers load the run's
model.path, which must exist here too. Ranks write checkpoints to the run's run_dir, which the hosts
must share. Workers stop with the run, with this command, and when they lose the controller.
"""

JOIN_MORE = """\
example:
  scp controller:ticket.json . && millrace join ticket.json --count 2
  millrace join ticket.json --role trainer
  millrace join ticket.json --role environment --count 8
"""

ENV_WORKER = """\
Run workers of a run's environment on this host: the same as `millrace join TICKET --role
environment`. See `millrace join --help` for the ticket, and for what both hosts must have.
"""

LAUNCH = """\
Write what a scheduler needs to run RUN.toml on several nodes: an sbatch script for SLURM, or
manifests for Kubernetes. The first node has the controller and its ranks of the trainer, the next
ones the trainer.remote ranks, and the others share engine.remote engines equally. The job writes a
checkpoint at SIGTERM, is requeued, and resumes.

Any setting can be overridden, as with `millrace train`: --section.key value. Options after -- are
lines of the sbatch script.
"""

LAUNCH_MORE = """\
examples:
  millrace launch slurm run.toml --nodes 3 --gpus 8 --output job.sh -- --time=24:00:00
  sbatch job.sh
  millrace launch kubernetes run.toml --nodes 3 --image IMAGE --claim NAME --output job.yaml
  kubectl apply -f job.yaml
"""

ENGINES = """\
Add engines to a running job, remove some, and list its engines. Run this command on the machine of
the controller. A new engine serves once it has the newest weights. A removed engine finishes its
sequences first.
"""

DASHBOARD = """\
Show runs in a browser: finished, running, and copied from other machines. Prints a URL with a
token. From another machine, use an ssh tunnel: ssh -L 8090:127.0.0.1:8090 HOST.
"""

INSPECT = """\
Summarise a finished, running or killed run: reward, accuracy, speed, staleness, how busy every
worker was and what it waited for, dropped groups, versions, changed settings and warnings. Draws
reward.png, staleness.png and timeline.png into RUN_DIR/plots, and parts.png if rewards have several
parts. With --ledger, prints the status of all issued tasks from the journal, and fails if they are
inconsistent. With --number, prints the status of one task.
"""

PUSH = """\
Push a checkpoint to a model repository on the Hugging Face hub, which is created if it does not
exist: the model or LoRA adapter, its tokenizer, and a model card with the base model, the settings,
the reward curve and the versions. The trainer's state stays here. The token comes from HF_TOKEN or
`hf auth login`.

example:
  millrace push runs/run --repo me/my-model --private --step 100 --license apache-2.0
"""

REPLAY = """\
Read episodes that a run recorded (setting monitoring.record_episodes), without an engine. With
--environment, replay them with the recorded replies and tool results; the output says where the
environment now behaves differently. Prints one line of JSON per episode.
"""

REPLAY_MORE = """\
examples:
  millrace replay run/episodes/step_3.jsonl --score my_rewards.py:strict
  millrace replay run/episodes/step_3.jsonl --environment envs.py:guess --tool-result 0=13
"""


# Options of train that are no settings.
PLAIN_OPTIONS = ("resume", "auto-resume", "dry-run", "json", "dashboard", "help")


def command() -> None:
    """The `millrace` command; ends the process."""
    status = main()
    from millrace.cluster.fork_server import end_process

    end_process(status)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings: dict[str, str] = {}
        more: list[str] = []  # options of another program
        if arguments[:1] in (["train"], ["sft"]):
            arguments, settings = split_settings(arguments)
        elif arguments[:1] == ["launch"] and "--" in arguments:
            dashes = arguments.index("--")
            arguments, more = arguments[:dashes], arguments[dashes + 1 :]
        if arguments[:1] in (["serve"], ["launch"], ["compare"], ["plan"], ["eval"]):
            has_undotted = arguments[0] in ("compare", "plan")
            undotted = _settings_without_dot() if has_undotted else ()
            arguments, settings = split_settings(arguments, only_dotted=True, undotted=undotted)
        args = _parser().parse_args(arguments)
        args.settings, args.options = settings, more
        with contextlib.nullcontext() if args.command == "init" else private_files():
            return args.run(args) or DONE
    except errors.MillraceError as error:
        return report(error)
    except errors.Terminated:
        print("stopped by SIGTERM", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def report(error: errors.MillraceError) -> int:
    """Print an error to stderr; returns the exit code."""
    text = f"error: {error}"
    if isinstance(error, errors.WorkerError | errors.RestartLimitExceeded) and error.traceback:
        text += f"\n\nFrom {error.worker}:\n{error.traceback.rstrip()}"
    print(errors.printable(text), file=sys.stderr)
    if isinstance(error, errors.Preempted):
        return PREEMPTED
    return WRONG_INPUT if isinstance(error, errors.ConfigError) else FAILED


def _settings_without_dot() -> Collection[str]:
    from millrace.config import RunConfig  # only for commands that read settings

    return RunConfig.model_fields


def split_settings(
    arguments: Sequence[str], *, only_dotted: bool = False, undotted: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Split the arguments of train or serve into its own, and settings: `--section.key value` or
    `--section.key=value`. With `only_dotted`, options without a dot are no settings, except these
    `undotted` ones."""
    rest: list[str] = []
    settings: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        key, equals, value = argument[2:].partition("=")
        name = key.replace("-", "_")
        is_option = "." not in key and name not in undotted
        is_plain = is_option if only_dotted else key in PLAIN_OPTIONS
        if not argument.startswith("--") or is_plain:
            rest.append(argument)
            continue
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise errors.ConfigError(f"--{key} needs a value.")
        table = key.partition(".")[0]
        if table in ("scorers", "tracker") and table != key:
            raise errors.ConfigError(
                f"--{key} cannot be set here; edit the [[{table}]] table instead."
            )
        settings[name] = value
    return rest, settings


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="millrace", description=INTRODUCTION, epilog=START_HERE, formatter_class=style
    )
    parser.add_argument("--version", action="version", version=f"millrace {millrace.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str, more: str = "", **settings: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, description=text, epilog=more, formatter_class=style, **settings
        )
        command.set_defaults(run=getattr(run, name.replace("-", "_")))
        return command

    demo = add("demo", DEMO, help="train a tiny model now")
    demo.add_argument("--run-dir", type=Path, default=Path("runs/demo"), metavar="DIR")
    demo.add_argument("--seed", type=int, default=0, help="of model, tasks and run (default: 0)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the summary here, too")

    init = add("init", INIT, help="write a project to start from")
    init.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIR")
    init.add_argument("--model", metavar="PATH", help="directory or hub name of the model to train")

    texts, usage = (options.TRAIN, options.TRAIN_MORE), f"millrace train {options.USAGE}"
    options.add_train(add("train", *texts, help="train with a TOML file", usage=usage))
    texts = (options.SFT, options.SFT_MORE)
    usage = "millrace sft RUN.toml [--resume|--auto-resume] [--section.key value ...]"
    options.add_run(add("sft", *texts, help="fine-tune on examples", usage=usage))
    presets = add("presets", PRESETS, help="list the designs of other libraries, or show one")
    presets.add_argument("show", nargs="?", choices=["show"], metavar="show")
    presets.add_argument("name", nargs="?", metavar="NAME")
    text = "write the settings of all presets as JSON to FILE (default: to the terminal)"
    presets.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
    options.add_eval(add("eval", options.EVAL, options.EVAL_MORE, help="measure a model"))
    text = "run several designs on the same work"
    options.add_compare(add("compare", options.COMPARE, options.COMPARE_MORE, help=text))
    options.add_plan(add("plan", options.PLAN, options.PLAN_MORE, help="predict a run"))
    add_arguments(add("serve", SERVE, SERVE_MORE, help="serve a model over HTTP"))
    _add_cluster_commands(add)
    _add_report_commands(add)

    listed = "\n".join(f"  {name:<10} {what}" for name, what in BENCHES.items())
    text = f"Measure on this machine.\n\n{listed}\n\n--help after NAME lists its options.\n"
    bench = add("bench", text, help=f"measure: {', '.join(BENCHES)}")
    bench.add_argument("bench", choices=BENCHES, metavar="NAME")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="[--json FILE] ...")
    return parser


def _add_cluster_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    text = "run a run's environment here: join --role environment"
    env_worker = command("env-worker", ENV_WORKER, help=text)
    env_worker.set_defaults(role="environment", device=None)
    join = command("join", JOIN, JOIN_MORE, help="add workers of this host to a run")
    folder = "folder for the output of the workers (default: logs)"
    for add in (env_worker.add_argument, join.add_argument):
        add("ticket", type=Path, metavar="TICKET")
        add("--count", type=int, default=1, metavar="N", help="workers (default: 1)")
        add("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help=folder)
    add = join.add_argument
    text = "engines, ranks of the trainer, or workers of the environment (default: engine)"
    add("--role", choices=run.JOIN_MODULES, default="engine", help=text)
    text = "GPUs of the engines or ranks, such as cuda:1,cuda:2 (default: all that PyTorch sees)"
    add("--device", metavar="GPUS", help=text)

    text = "write a job for SLURM or Kubernetes"
    add = command("launch", LAUNCH, LAUNCH_MORE, help=text).add_argument
    add("scheduler", choices=["slurm", "kubernetes"], metavar="slurm|kubernetes")
    add("config", type=Path, metavar="RUN.toml")
    add("--nodes", type=int, default=1, metavar="N", help="nodes or pods (default: 1)")
    text = "GPUs per node, of all roles or of one: controller, trainer, engines; may be repeated"
    add("--gpus", action="append", default=[], metavar="[ROLE=]N", help=text)
    add("--output", type=Path, metavar="FILE", help="write to this file (default: stdout)")
    text = "a Job and a StatefulSet (default), or a RayJob for the KubeRay operator"
    add("--kind", choices=["job", "rayjob"], default="job", metavar="job|rayjob", help=text)
    add("--image", metavar="IMAGE", help="container image with Millrace, for Kubernetes")
    text = "volume claim that holds the folder of RUN.toml, for Kubernetes"
    add("--claim", metavar="NAME", help=text)

    text = "add engines to a running job, or remove some"
    add = command("engines", ENGINES, help=text).add_argument
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("--add", type=int, default=0, metavar="N", help="start N engines")
    text = "remove this engine; may be repeated"
    add("--remove", action="append", default=[], metavar="NAME", help=text)


def _add_report_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    add = command("dashboard", DASHBOARD, help="show runs in a browser").add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    add("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    add("--port", type=int, default=8090, help="0: any (default: 8090)")
    text = "device of the checkpoint that the page chats with (default: cpu)"
    add("--chat-device", default="cpu", metavar="DEVICE", help=text)

    add = command("inspect", INSPECT, help="summarise a run and draw its plots").add_argument
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("--no-plots", action="store_true", help="print the summary only")
    text = "count all tasks instead: trained, dropped, failed or pending"
    add("--ledger", action="store_true", help=text)
    text = "show the status of the task with this number only"
    add("--number", type=int, metavar="N", help=text)

    add = command("push", PUSH, help="push a checkpoint to the Hugging Face hub").add_argument
    add("run_dir", type=Path, metavar="RUN_DIR")
    add("--repo", required=True, metavar="OWNER/NAME", help="repository on the hub")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    add("--private", action="store_true", help="make a new repository private")
    text = "hub to push to (default: HF_ENDPOINT, or the public one)"
    add("--endpoint", metavar="URL", help=text)
    add("--license", metavar="ID", help="licence in the model card, such as apache-2.0")
    text = "replace the model card that the repository has"
    add("--replace-card", action="store_true", help=text)

    text = "read, play or score recorded episodes"
    add = command("replay", REPLAY, REPLAY_MORE, help=text).add_argument
    add("path", type=Path, metavar="FILE")
    add("--environment", metavar="MODULE:NAME", help="replay with this function")
    add("--model", metavar="DIR", help="model of the tokenizer (default: the recorded one)")
    add("--config", type=Path, metavar="RUN.toml", help="rescore with the [[scorers]] of this file")
    add("--reward", type=float, help="replace the environment's reward")
    add("--out", type=Path, metavar="FILE", help="write the new episodes there")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    text = "score them again with a reward function, or a verifier by its type"
    add("--score", dest="scores", metavar="MODULE:NAME", help=text, **repeated)
    text = "replace the result of tool call N; without =TEXT, by an empty result"
    add("--tool-result", dest="tool_results", metavar="N=TEXT", help=text, **repeated)


if __name__ == "__main__":
    sys.exit(main())
