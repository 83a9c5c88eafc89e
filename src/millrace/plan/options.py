"""The options of `millrace plan`. Imports nothing heavy."""

import argparse
from pathlib import Path

PLAN = """\
Predict a run before it starts: speed, staleness, memory per device, busy shares and cost, by a
simulation that uses the run's own admission, buffer and staleness code. With --gpus, search the
best split into engines and trainer ranks; without, predict RUN.toml on the CPU cores of this
machine. Writes RUN.plan.toml, the file to run, RUN.plan.json and RUN.plan.png.

With --calibrate, first measure this machine with the model of RUN.toml for about a minute. Later
plans for this machine use the measurement.
"""
PLAN_MORE = """\
examples:
  millrace plan run.toml --gpus 64 --gpu h100
  millrace plan run.toml --gpus 8 --gpu h200 --lengths runs/first --max-staleness 2
  millrace plan run.toml --gpus 8 --lengths median=900,p90=6000,prompt_tokens=300 --price 2.5
  millrace plan run.toml --calibrate
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="RUN.toml")
    add("--gpus", type=int, metavar="N", help="GPUs of the whole run")
    add("--gpu", default="h100", metavar="NAME", help="kind of GPU (default: h100)")
    text = "lengths of completions: a JSON file, a run directory, or median=800,p90=4000"
    add("--lengths", metavar="SOURCE", help=text)
    text = "groups per step to try (default: that of RUN.toml)"
    add("--groups-per-step", type=int, nargs="+", default=[], metavar="N", help=text)
    text = "highest staleness limit to try (default: 8)"
    add("--max-staleness", type=int, default=8, metavar="N", help=text)
    add("--price", type=float, metavar="P", help="of one GPU for an hour, for the cost")
    add("--calibrate", action="store_true", help="measure this machine first, about a minute")
    text = "of --calibrate (default: ~/.cache/millrace/calibration.json)"
    add("--calibration", type=Path, metavar="FILE", help=text)
    add("--json", type=Path, metavar="FILE", help="also write the plan there")
