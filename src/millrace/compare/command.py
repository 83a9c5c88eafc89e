"""`millrace compare`: makes the runs, and writes their table and their page."""

import argparse
import json
import shlex
import sys

from millrace.compare.designs import plan_designs
from millrace.compare.report import markdown, page
from millrace.compare.runs import Comparison
from millrace.core.errors import ConfigError


def compare(args: argparse.Namespace) -> bool:
    """True if all runs finished."""
    if min(args.seeds, args.parallel) < 1:
        raise ConfigError("--seeds and --parallel are 1 or more; otherwise there is no run.")
    folder = (args.out or args.configs[0].parent / "compare").resolve()
    designs = plan_designs(
        [config.resolve() for config in args.configs],
        presets=[name for name in args.presets.split(",") if name],
        sweeps=args.sweep,
        settings=args.settings,
    )
    notes = list(dict.fromkeys(note for design in designs for note in design.notes))
    for note in notes:
        print(note)
    comparison = Comparison(designs, range(args.seeds), folder, args.target)
    rows = comparison.run(parallel=args.parallel)
    command = shlex.join(["millrace", *sys.argv[1:]])
    table = markdown(rows, notes=notes)
    (folder / "table.md").write_text(f"`{command}`\n\n{table}")
    result = {"command": command, "target": args.target, "notes": notes, "rows": rows}
    (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "page.html").write_text(page(rows, command=command, notes=notes))
    print(f"{table}\nwrote table.md, results.json and page.html to {folder}")
    return all(row["status"] == "finished" for row in rows)
