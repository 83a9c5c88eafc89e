"""The options of `millrace train`, `sft`, `eval`, `compare` and `plan`. Imports nothing heavy."""

import argparse
from pathlib import Path

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
  millrace train run.toml --preset pipeline_rl      the design of another library
  millrace train run.toml --resume
  millrace train run.toml --dry-run

files in the run directory (setting run_dir):
  config.toml         all settings of the run
  metrics.jsonl       one object per step
  trace.json          activity of every worker, for ui.perfetto.dev
  rollouts/           some episodes of every step, with the numbers of their tokens
  lifecycle/          when each group was generated, scored, buffered and trained
  checkpoints/step_N  Hugging Face model directories, with the trainer's state
  logs/               output of the workers
  summary.json        written when the run has finished

Ctrl-C stops all workers; --resume continues from the newest checkpoint. SIGTERM first writes a
checkpoint (setting checkpoint.grace_s) and then exits with code 75.
"""

SFT = """\
Fine-tune a model on examples, with the settings of a TOML file: conversations ("messages", whose
assistant turns are trained) or a "prompt" and its "completion". Its checkpoints are models that
`millrace train` can start from (setting model.path).

Settings are those of `millrace train`, in [tasks], [trainer], [optimizer], [lora], [checkpoint] and
others; those about generation are ignored. Any of them can be overridden:
--section.key value.
"""

SFT_MORE = """\
examples:
  millrace sft sft.toml
  millrace sft sft.toml --tasks.epochs 3 --optimizer.learning_rate 2e-5
  millrace sft sft.toml --resume
"""

EVAL = """\
Measure a model on held-out tasks: accuracy with its standard error, mean reward, and pass@k. SOURCE
is a model folder, a run directory, whose settings and checkpoints are used, or the TOML file of a
run. Any setting can be overridden: --section.key value.
"""

EVAL_MORE = """\
examples:
  millrace eval path/to/model --tasks held_out.jsonl --scorer exact
  millrace eval runs/first --checkpoints all --json results.json
  millrace eval run.toml --model path/to/model --samples 8 --temperature 0.7
"""

COMPARE = """\
Run several designs on the same work, and write one table (table.md, results.json) and one page
(page.html): presets, several settings files, or values of a setting. A design that sets the same
key as RUN.toml loses: leave out of RUN.toml what the designs decide.

With --parallel N, each of the N runs has its own share of the cores, but they share caches, memory
and GPUs. A run that fails is a row. The same command again makes what is missing.
"""
COMPARE_MORE = """\
examples:
  millrace compare run.toml --presets trl_async,pipeline_rl,areal --seeds 3 --target 0.8
  millrace compare a.toml b.toml
  millrace compare run.toml --sweep buffer.max_staleness=0,4,16 --trainer.steps 50
"""

PLAN = """\
Predict a run before it starts: speed, staleness, memory per device, busy shares and cost, by a
simulation that uses the run's own admission, buffer and staleness code. With --gpus, search the
best split into engines and trainer ranks; without, predict RUN.toml on this machine: on its CPU
cores, or on one GPU that engine and trainer share. Writes RUN.plan.toml, the file to run,
RUN.plan.json and RUN.plan.png. Any setting can be overridden: --section.key value.

With --calibrate, first measure this machine with the model of RUN.toml for a minute or two. Later
plans for this machine use the measurement.
"""
PLAN_MORE = """\
examples:
  millrace plan run.toml --gpus 64 --gpu h100
  millrace plan run.toml --gpus 8 --gpu h200 --lengths runs/first --max-staleness 2
  millrace plan run.toml --gpus 8 --lengths median=900,p90=6000,prompt_tokens=300 --price 2.5
  millrace plan run.toml --calibrate
"""

USAGE = """\
RUN.toml [--preset NAME] [--resume|--auto-resume] [--dry-run [--json FILE]]
         [--dashboard] [--section.key value ...]"""


def add_run(parser: argparse.ArgumentParser) -> None:
    """The options that train and sft share."""
    add = parser.add_argument
    add("config", type=Path, metavar="RUN.toml")
    add("--resume", action="store_true", help="continue from the newest checkpoint")
    text = "resume the run if it has started, start it if not; for jobs that are requeued"
    add("--auto-resume", action="store_true", help=text)


def add_train(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    text = "print which process would use which device, and start nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: write the placement and its memory there, too"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    parser.add_argument("--dashboard", action="store_true", help="show the run in a browser")


def add_eval(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE")
    add("--tasks", metavar="FILE", help="held-out tasks (default: setting evaluate.path)")
    text = "verifier by its type, or reward function, instead of the run's; may be repeated"
    name = "NAME|FILE.py:NAME"
    add("--scorer", dest="scorers", metavar=name, help=text, action="append", default=[])
    add("--model", metavar="PATH", help="model instead of the one of the settings")
    text = "of a run directory: last (default), all, or steps such as 100,200"
    add("--checkpoints", default="last", metavar="WHICH", help=text)
    add("--samples", type=int, metavar="K", help="episodes per task (default: evaluate.samples)")
    add("--temperature", type=float, help="(default: 0 for one sample)")
    add("--json", type=Path, metavar="FILE", help="write the results here, too")


def add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("configs", type=Path, nargs="+", metavar="RUN.toml")
    add("--presets", default="", metavar="NAME,NAME", help="designs; see `millrace presets`")
    text = "values of a setting; may be repeated, for all combinations"
    add("--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE", help=text)
    add("--seeds", type=int, default=1, metavar="N", help="runs of each design (default: 1)")
    add("--target", type=float, metavar="ACCURACY", help="report the time to this accuracy")
    add("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    text = "folder for runs and results (default: compare, beside the first RUN.toml)"
    add("--out", type=Path, metavar="DIR", help=text)
    add("--json", type=Path, metavar="FILE", help="write a short row of each run there, too")


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="RUN.toml")
    add("--preset", metavar="NAME", help="design to plan; see `millrace presets`")
    add("--gpus", type=int, metavar="N", help="GPUs of the whole run")
    add("--gpu", default="h100", metavar="NAME", help="kind of GPU (default: h100)")
    text = "lengths of completions: a JSON file, a run directory, or median=800,p90=4000"
    add("--lengths", metavar="SOURCE", help=text)
    text = "groups per step to try (default: that of RUN.toml)"
    add("--groups-per-step", type=int, nargs="+", default=[], metavar="N", help=text)
    text = "highest staleness limit to try (default: buffer.max_staleness if it is set, else 8)"
    add("--max-staleness", type=int, metavar="N", help=text)
    add("--price", type=float, metavar="P", help="of one GPU for an hour, for the cost")
    add("--calibrate", action="store_true", help="measure this machine first, a minute or two")
    text = "of --calibrate (default: ~/.cache/millrace/calibration.json)"
    add("--calibration", type=Path, metavar="FILE", help=text)
    add("--json", type=Path, metavar="FILE", help="also write the plan there")
