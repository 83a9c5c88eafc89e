"""The options of `millrace compare`. Imports nothing heavy."""

import argparse
from pathlib import Path

COMPARE = """\
Run several designs on the same work, and write one table (table.md, results.json) and one page
(page.html): presets, several settings files, or values of a setting. A design that sets the same
key as RUN.toml loses: leave out of RUN.toml what the designs decide.

Runs at the same time share the cores: compare speeds without --parallel. A run that fails is a row.
The same command again makes what is missing.
"""
COMPARE_MORE = """\
examples:
  millrace compare run.toml --presets trl_async,pipeline_rl,areal --seeds 3 --target 0.8
  millrace compare a.toml b.toml
  millrace compare run.toml --sweep buffer.max_staleness=0,4,16 --trainer.steps 50
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
