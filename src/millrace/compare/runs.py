"""`millrace compare`: settings files, presets and values of a sweep, for each seed, as runs.

Each run is a `millrace train` process, and a row is written when it ends, so a comparison that was
interrupted has the rows so far. What it reports of a run comes from the files in its run directory.
"""

import argparse
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.compare.report import markdown, page
from millrace.config import load_config, parse_overrides
from millrace.core.errors import ConfigError, printable
from millrace.monitoring.activity import mean_by_role, total_shares
from millrace.monitoring.files.metrics import read_metrics, run_rates, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.report.summary import accuracy_by_step
from millrace.monitoring.run_dir import RunDir
from millrace.run.checks import check_settings

_SAMPLE_S = 1.0  # between two readings of the memory, at least
_SAMPLE_SHARE = 0.05  # of the time at most: the kernel holds up a process while it adds its pages


@dataclass(frozen=True)
class Design:
    name: str
    source: Path
    preset: str | None
    settings: Mapping[str, str]  # by dotted key
    notes: tuple[str, ...]  # axes of the preset that the settings override

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "_", self.name)

    def arguments(self, *, seed: int, run_dir: Path) -> list[str]:
        """Of `millrace`, for one run."""
        given = {**self.settings, "seed": str(seed), "run_dir": json.dumps(str(run_dir))}
        options = [f"--{key}={value}" for key, value in given.items()]
        preset = [] if self.preset is None else ["--preset", self.preset]
        return ["train", str(self.source), "--auto-resume", *preset, *options]


def plan_designs(
    sources: Sequence[Path],
    *,
    presets: Sequence[str],
    sweeps: Sequence[str],
    settings: Mapping[str, str],
) -> list[Design]:
    """All combinations, checked."""
    values = [list(_values(sweep)) for sweep in sweeps]
    designs: list[Design] = []
    combinations = list(itertools.product(*values))
    for source, preset, swept in itertools.product(sources, presets or [None], combinations):
        own = {**settings, **dict(swept)}
        parts = [source.stem] if len(sources) > 1 or not (presets or sweeps) else []
        parts += [preset] if preset else []
        parts += [f"{key}={value}" for key, value in swept]
        notes: list[str] = []
        overrides = parse_overrides(own)
        check_settings(load_config(source, overrides=overrides, preset=preset, report=notes.append))
        name = ", ".join(parts)
        designs.append(Design(name, source, preset, settings=own, notes=tuple(notes)))
    folders = [design.folder for design in designs]
    if twice := {design.name for design in designs if folders.count(design.folder) > 1}:
        raise ConfigError(
            f"Two designs are named {min(twice)!r}; rename a settings file, or remove one of them."
        )
    return designs


def _values(sweep: str) -> Iterator[tuple[str, str]]:
    key, equals, values = sweep.partition("=")
    if not equals or not key or not values.strip(","):
        raise ConfigError(
            f"--sweep {sweep!r} is not KEY=VALUE,VALUE, such as buffer.max_staleness=0,4,16."
        )
    return ((key, value) for value in values.split(",") if value)


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
        print(printable(note))
    folder.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(max_workers=args.parallel)
    try:
        pairs = itertools.product(designs, range(args.seeds))
        jobs = [pool.submit(_row, *pair, folder=folder, target=args.target) for pair in pairs]
        rows = [job.result() for job in jobs]
    finally:
        pool.shutdown(cancel_futures=True)
    command = shlex.join(["millrace", *sys.argv[1:]])
    shown = markdown(rows, notes=notes)
    (folder / "table.md").write_text(f"`{command}`\n\n{shown}")
    result = {"command": command, "target": args.target, "notes": notes, "rows": rows}
    (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "page.html").write_text(page(rows, command=command, notes=notes))
    print(f"{printable(shown)}\nwrote table.md, results.json and page.html to {folder}")
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
        print(f"{printable(design.name)}, seed {seed} ...", flush=True)
        is_whole = not run_dir.exists()
        ended = train_process(arguments, log=run_dir.with_suffix(".log"))
        row |= {"status": "failed" if ended.error else "finished", **ended._asdict()}
        row |= {} if is_whole else {"peak_mib": None, "peak_gpu_mib": None}  # of a part
    row |= {"design": design.name, "seed": seed}
    file.write_text(json.dumps(row, indent=2) + "\n")
    is_measured = row["status"] == "finished"
    return row | (measure_run(RunDir(run_dir), target=target) if is_measured else {})


class EndedRun(NamedTuple):
    error: str | None
    peak_mib: float  # host memory of its processes together
    peak_gpu_mib: float | None  # of all GPUs, beyond what was used before; None without a GPU


def train_process(arguments: list[str], *, log: Path) -> EndedRun:
    """The run ends with this process, so that a repeated command finds none that still works."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "millrace", *arguments, "--monitoring.progress=lines"]
    peak_mib, gpu_mib = 0.0, [used_gpu_mib()]
    with log.open("w") as output:
        process = subprocess.Popen(
            with_parent_death_signal(command), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                began_s = time.monotonic()
                peak_mib = max(peak_mib, sum(map(_pss_kib, _family(process.pid))) / 1024)
                gpu_mib.append(used_gpu_mib())
                time.sleep(max(_SAMPLE_S, (time.monotonic() - began_s) / _SAMPLE_SHARE))
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


# What an engine does or waits for only because of new weights. Sequences that end during a drain
# are work, and do not count.
_SYNC = ("swap", "waiting for weights", "drained")


def measure_run(run_dir: RunDir, *, target: float | None) -> dict[str, Any]:
    """None stands for what this run did not measure."""
    rows = read_metrics(run_dir.metrics)
    last = rows[-1]
    summary = run_dir.read_summary()
    wasted = table(last, "tokens/wasted")
    roles = mean_by_role(total_shares(read_trace(run_dir.trace)))
    engine, trainer = roles.get("engine"), roles.get("trainer")
    sync = {**engine.doing, **engine.waiting} if engine else {}
    seconds = last["throughput/time_s"]
    return {
        "samples_per_s": run_rates(last).get("samples_per_s"),
        "seconds": seconds,
        "time_to_target_s": None if target is None else _time_to(target, rows, summary),
        "accuracy": summary["accuracy_after"],
        "reward": last["reward/mean"],
        "staleness": _staleness(rows),
        "wasted": wasted,
        "wasted_share": sum(wasted.values()) / max(last["throughput/tokens"], 1),
        "engine_idle": engine and 1 - engine.busy,
        "trainer_idle": trainer and 1 - trainer.busy,
        "sync_share": engine and sum(sync.get(name, 0.0) for name in _SYNC),
    }


def _time_to(target: float, rows: list[dict[str, Any]], summary: dict[str, Any]) -> float | None:
    """Training time at the step after which an evaluation reached the target; None if none did."""
    ended_s = {0: 0.0, **{row["step"]: row["throughput/time_s"] for row in rows}}
    measured = accuracy_by_step(rows, summary)
    reached = (step for step, accuracy in measured.items() if accuracy >= target)
    return ended_s.get(min(reached, default=-1))


def _staleness(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of trained tokens by staleness; steps count by their mean length."""
    tokens: Counter[int] = Counter()
    whole = sum(row["completion_length/mean"] for row in rows)
    for row in rows:
        for staleness, share in table(row, "staleness/share").items():
            tokens[int(staleness)] += share * row["completion_length/mean"] / whole
    return {str(staleness): share for staleness, share in sorted(tokens.items())}
