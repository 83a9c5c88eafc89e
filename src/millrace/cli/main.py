"""The command line: demo, init, train, serve, join, inspect, replay, bench.

Promise: every error is one sentence on stderr and an exit code; only the traceback of a failed
worker follows it. Nothing heavy is imported before a command needs it.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import millrace
from millrace.bench import BENCHES
from millrace.cli import commands as run
from millrace.cli.commands import DONE, FAILED, INTERRUPTED, WRONG_INPUT
from millrace.core.errors import (
    ConfigError,
    MillraceError,
    RestartLimitExceeded,
    WorkerError,
    printable,
)
from millrace.core.files import private_files
from millrace.serving.options import SERVE, SERVE_MORE, add_arguments

INTRODUCTION = """\
Asynchronous reinforcement-learning post-training of language models. Engines generate
without stopping, the trainer steps without waiting, and every token records the version
of the weights that sampled it.
"""

START_HERE = """\
start here:
  millrace demo                    train a tiny model on this machine, to see that it works
  millrace init my-run             write settings, a reward function, tasks and a tiny model
                                   (--model PATH: use your own model instead)
  millrace train my-run/run.toml   train with these settings
  millrace inspect my-run/run      show a summary and draw plots

exit codes:
  0 success   1 the run failed   2 wrong setting, argument or input   130 interrupted
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

TRAIN = """\
Train with the settings of a TOML file.

Any setting can be overridden: --section.key value.
Values are read as TOML (12, 3e-5, true, [0.9, 0.95]); anything else is a string. The value none
removes an optional setting or table (--lora none).
Relative paths in the file start from the folder of the file; paths given here start from the
working directory.
"""

TRAIN_MORE = """\
examples:
  millrace train run.toml
  millrace train run.toml --trainer.steps 500 --optimizer.learning_rate 3e-5
  millrace train run.toml --run_dir runs/second --seed 2 --loss.high=0.3
  millrace train run.toml --resume
  millrace train run.toml --dry-run

files in the run directory (setting run_dir):
  config.toml         all settings of the run
  metrics.jsonl       one object per step
  trace.json          activity of every worker, for ui.perfetto.dev
  rollouts/           some episodes of every step, for reading
  checkpoints/step_N  Hugging Face model directories, with the trainer's state
  logs/               output of the workers
  summary.json        written when the run has finished

Ctrl-C stops all workers; --resume continues from the newest checkpoint.
"""

JOIN = """\
Add engines of this host to a run whose controller is on another host. The run writes a ticket
(setting cluster.ticket); copy it here, for example over ssh. It is a secret: this command refuses a
ticket that other users of this machine can read.

The engines load the run's model.path, which must exist here too. They stop with the run, with this
command, and when they lose the controller.
"""

JOIN_MORE = """\
example:
  scp controller:ticket.json . && millrace join ticket.json --count 2
"""

ENGINES = """\
Add engines to a running job, remove some, and list its engines. Run this command on the machine of
the controller. A new engine serves once it has the newest weights. A removed engine finishes its
sequences first.
"""

INSPECT = """\
Summarise a finished, running or killed run: reward, accuracy, speed, staleness, how busy every
worker was and what it waited for, and dropped groups. Draws reward.png, staleness.png and
timeline.png into RUN_DIR/plots, and parts.png if rewards have several parts. With --ledger, prints
the status of all issued tasks from the journal, and fails if they are inconsistent. With --number,
prints the status of one task.
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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings: dict[str, str] = {}
        if arguments[:1] == ["train"]:
            arguments, settings = split_settings(arguments)
        elif arguments[:1] == ["serve"]:
            arguments, settings = split_settings(arguments, only_dotted=True)
        args = _parser().parse_args(arguments)
        args.settings = settings
        with contextlib.nullcontext() if args.command == "init" else private_files():
            return args.run(args) or DONE
    except MillraceError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def report(error: MillraceError) -> int:
    """Print an error to stderr; returns the exit code."""
    text = f"error: {error}"
    if isinstance(error, WorkerError | RestartLimitExceeded) and error.traceback:
        text += f"\n\nFrom {error.worker}:\n{error.traceback.rstrip()}"
    print(printable(text), file=sys.stderr)
    return WRONG_INPUT if isinstance(error, ConfigError) else FAILED


def split_settings(
    arguments: Sequence[str], *, only_dotted: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Split the arguments of train or serve into its own, and settings: `--section.key value` or
    `--section.key=value`. With `only_dotted`, options without a dot are no settings."""
    rest: list[str] = []
    settings: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        key, equals, value = argument[2:].partition("=")
        is_plain = "." not in key if only_dotted else key in ("resume", "dry-run", "help")
        if not argument.startswith("--") or is_plain:
            rest.append(argument)
            continue
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                hint = (
                    ""
                    if only_dotted
                    else "; --resume and --dry-run are the only options without one"
                )
                raise ConfigError(f"--{key} needs a value{hint}.")
        table = key.partition(".")[0]
        if table in ("scorers", "tracker") and table != key:
            raise ConfigError(f"--{key} cannot be set here; edit the [[{table}]] table instead.")
        settings[key.replace("-", "_")] = value
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
        command.set_defaults(run=getattr(run, name))
        return command

    demo = add("demo", DEMO, help="train a tiny model now")
    demo.add_argument("--run-dir", type=Path, default=Path("runs/demo"), metavar="DIR")
    demo.add_argument("--seed", type=int, default=0, help="of model, tasks and run (default: 0)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the summary here, too")

    init = add("init", INIT, help="write a project to start from")
    init.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIR")
    init.add_argument("--model", metavar="PATH", help="directory or hub name of the model to train")

    usage = "millrace train RUN.toml [--resume] [--dry-run] [--section.key value ...]"
    text = "train with the settings of a TOML file"
    train = add("train", TRAIN, TRAIN_MORE, help=text, usage=usage)
    train.add_argument("config", type=Path, metavar="RUN.toml")
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    text = "print which process would use which device, and start nothing"
    train.add_argument("--dry-run", action="store_true", help=text)

    add_arguments(add("serve", SERVE, SERVE_MORE, help="serve a model over HTTP"))

    join = add("join", JOIN, JOIN_MORE, help="add engines of this host to a run")
    join.add_argument("ticket", type=Path, metavar="TICKET")
    join.add_argument("--count", type=int, default=1, metavar="N", help="engines (default: 1)")
    text = "folder for the output of the engines (default: logs)"
    join.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help=text)

    engines = add("engines", ENGINES, help="add engines to a running job, or remove some")
    engines.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    engines.add_argument("--add", type=int, default=0, metavar="N", help="start N engines")
    text = "remove this engine; may be repeated"
    engines.add_argument("--remove", action="append", default=[], metavar="NAME", help=text)

    _add_report_arguments(
        inspect=add("inspect", INSPECT, help="summarise a run and draw its plots"),
        replay=add("replay", REPLAY, REPLAY_MORE, help="read, play or score recorded episodes"),
    )

    listed = "\n".join(f"  {name:<10} {what}" for name, what in BENCHES.items())
    text = f"Measure on this machine.\n\n{listed}\n"
    more = "`millrace bench NAME --help` lists the options of one.\n"
    bench = add("bench", text, more, help=f"measure: {', '.join(BENCHES)}")
    bench.add_argument("bench", choices=BENCHES, metavar="NAME")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="[--json FILE] ...")
    return parser


def _add_report_arguments(
    *, inspect: argparse.ArgumentParser, replay: argparse.ArgumentParser
) -> None:
    inspect.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    inspect.add_argument("--no-plots", action="store_true", help="print the summary only")
    text = "count all tasks instead: trained, dropped, failed or pending"
    inspect.add_argument("--ledger", action="store_true", help=text)
    text = "show the status of the task with this number only"
    inspect.add_argument("--number", type=int, metavar="N", help=text)

    add = replay.add_argument
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
