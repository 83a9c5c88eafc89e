"""`millrace compare`: makes each run as a `millrace train` process, and keeps a row for each.

A row is written when its run ends, so a comparison that was interrupted has the rows so far.
"""

import argparse
import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from millrace.compare.designs import Design, plan_designs
from millrace.compare.measures import measure_run
from millrace.compare.report import markdown, page
from millrace.core.errors import ConfigError
from millrace.monitoring.run_dir import RunDir

_SAMPLE_S = 1.0  # between two readings of the memory


def compare(args: argparse.Namespace) -> bool:
    """Make the runs and write their table and page; True if all runs finished."""
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
    folder.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(max_workers=args.parallel)
    try:
        pairs = itertools.product(designs, range(args.seeds))
        jobs = [pool.submit(_row, *pair, folder=folder, target=args.target) for pair in pairs]
        rows = [job.result() for job in jobs]
    finally:
        pool.shutdown(cancel_futures=True)
    command = shlex.join(["millrace", *sys.argv[1:]])
    table = markdown(rows, notes=notes)
    (folder / "table.md").write_text(f"`{command}`\n\n{table}")
    result = {"command": command, "target": args.target, "notes": notes, "rows": rows}
    (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "page.html").write_text(page(rows, command=command, notes=notes))
    print(f"{table}\nwrote table.md, results.json and page.html to {folder}")
    return all(row["status"] == "finished" for row in rows)


def _row(design: Design, seed: int, *, folder: Path, target: float | None) -> dict[str, Any]:
    """Of a run that is made now, or was made before."""
    run_dir = folder / design.folder / f"seed_{seed}"
    file = run_dir.with_suffix(".json")
    arguments = design.arguments(seed=seed, run_dir=run_dir)
    settings = f"{design.source.read_text()}\n{arguments}"
    row = json.loads(file.read_text()) if file.is_file() else {"settings": settings}
    if row["settings"] != settings:
        raise ConfigError(f"{file} is of a run with other settings; choose another --out.")
    if row.get("status") != "finished":
        print(f"{design.name}, seed {seed} ...", flush=True)
        ended = train_process(arguments, log=run_dir.with_suffix(".log"))
        row |= {"status": "failed" if ended.error else "finished", **ended._asdict()}
    row |= {"design": design.name, "seed": seed}
    file.write_text(json.dumps(row, indent=2) + "\n")
    is_measured = row["status"] == "finished"
    return row | (measure_run(RunDir(run_dir), target=target) if is_measured else {})


class EndedRun(NamedTuple):
    error: str | None
    peak_mib: float  # host memory of its processes together
    peak_gpu_mib: float | None  # of all GPUs, beyond what was used before; None without a GPU


def train_process(arguments: list[str], *, log: Path) -> EndedRun:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "millrace", *arguments, "--monitoring.progress=lines"]
    peak_mib, gpu_mib = 0.0, [used_gpu_mib()]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                peak_mib = max(peak_mib, sum(map(_pss_kib, _family(process.pid))) / 1024)
                gpu_mib.append(used_gpu_mib())
                time.sleep(_SAMPLE_S)
        finally:
            process.terminate()  # after an interrupt; an ended process is not affected
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    error = (errors or [f"exit code {process.returncode}; see {log}"])[-1]
    used_mib = max(gpu_mib) - gpu_mib[0] or None
    return EndedRun(error if process.returncode else None, peak_mib, used_mib)


def used_gpu_mib() -> float:
    """Of all GPUs of this host and all processes, as nvidia-smi reports it; 0 without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    reply = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sum(float(line) for line in reply.split() if line.isdigit())


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        files = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:  # it has ended
        return []
    return [pid, *(one for child in children for one in _family(child))]


def _pss_kib(pid: int) -> int:
    """Memory of a process, in which shared pages count in part; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
