"""`millrace compare`: settings files, presets and values of a sweep, for each seed, as runs.

Each run is a `millrace train` process, and a row is written when it ends, so a comparison that was
interrupted has the rows so far. What it reports of a run comes from the files in its run directory.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from millrace.cluster.parent_death import with_parent_death_signal
from millrace.cluster.process import core_shares
from millrace.compare.report import markdown, page
from millrace.config import load_config, parse_overrides
from millrace.core.errors import ConfigError, MillraceError, printable
from millrace.monitoring.activity import mean_by_role, total_shares
from millrace.monitoring.files.metrics import flatten, read_metrics, run_rates, table
from millrace.monitoring.files.trace import read_trace
from millrace.monitoring.report.summary import accuracy_by_step
from millrace.monitoring.run_dir import RunDir, to_json, write_atomically
from millrace.run.checks import check_settings

# The keys of a row of --json, and those of results.json.
_SHORT = {
    **{key: key for key in ("design", "preset", "seed", "status", "error", "samples_per_s")},
    "seconds_to_reward": "time_to_target_s",
    "accuracy_after": "accuracy",
    "staleness_mean": "mean_staleness",
    "tokens_wasted_share": "wasted_share",
}
_SAMPLE_S = 1.0  # between two readings of the memory, at least
_SAMPLE_SHARE = 0.05  # of the time at most: the kernel holds up a process while it adds its pages


@dataclass(frozen=True)
class Design:
    name: str
    source: Path
    preset: str | None
    settings: Mapping[str, str]  # of the command line, by dotted key
    resolved: Mapping[str, Any]  # all settings of its runs but seed and run_dir, by dotted key
    notes: tuple[str, ...]  # axes of the preset that the settings override

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=-]+", "_", self.name)

    def arguments(self, *, seed: int, run_dir: Path) -> list[str]:
        """The command line of `millrace` for one run."""
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
        for key, option in (("seed", "--seeds N"), ("run_dir", "--out DIR")):
            if key in own:
                raise ConfigError(
                    f"Each run of a comparison has its own {key}; leave out {key} = {own[key]}, and"
                    f" use {option}."
                )
        parts = [source.stem] if len(sources) > 1 or not (presets or sweeps) else []
        parts += [preset] if preset else []
        parts += [f"{key}={value}" for key, value in swept]
        notes: list[str] = []
        overrides = parse_overrides(own)
        config = load_config(source, overrides=overrides, preset=preset, report=notes.append)
        check_settings(config)
        dumped = config.model_dump(mode="json", exclude={"seed", "run_dir"})
        resolved = flatten(dumped, separator=".")
        designs.append(Design(", ".join(parts), source, preset, own, resolved, tuple(notes)))
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
    # All designs with one seed first, so that an interrupted comparison has run each of them.
    pairs = itertools.product(range(args.seeds), designs)
    runs = [_Run(design, seed, folder=folder) for seed, design in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    pool = side_by_side(args.parallel)
    try:
        rows = list(pool.map(lambda run: run.row(target=args.target), runs))
    finally:
        pool.shutdown(cancel_futures=True)
    command = shlex.join(["millrace", *sys.argv[1:]])
    shown = markdown(rows, notes=notes)
    write_atomically(folder / "table.md", f"`{command}`\n\n{shown}")
    result = {"command": command, "target": args.target, "notes": notes, "rows": rows}
    write_atomically(folder / "results.json", json.dumps(to_json(result), indent=2) + "\n")
    if args.json is not None:
        short = [{key: row.get(name) for key, name in _SHORT.items()} for row in rows]
        args.json.write_text(json.dumps(to_json(short), indent=2) + "\n")
    write_atomically(folder / "page.html", page(rows, command=command, notes=notes))
    print(f"{printable(shown)}\nwrote table.md, results.json and page.html to {folder}")
    return all(row["status"] == "finished" for row in rows)


def side_by_side(count: int) -> ThreadPoolExecutor:
    """Threads of which each, with all processes that it starts, has its own share of the cores,
    where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        return ThreadPoolExecutor(count)
    shares = iter(core_shares(count))
    return ThreadPoolExecutor(count, initializer=lambda: os.sched_setaffinity(0, next(shares)))


class _Run:
    """A run of this command, which an earlier command may have made or begun."""

    def __init__(self, design: Design, seed: int, *, folder: Path) -> None:
        self._design, self._seed = design, seed
        self._dir = RunDir(folder / design.folder / f"seed_{seed}")
        self._file = self._dir.path.with_suffix(".json")
        self._ended = self._read() if self._file.is_file() else {}

    def _read(self) -> dict[str, Any]:
        """How the run ended; raises ConfigError if it had other settings."""
        try:
            ended = json.loads(self._file.read_text())
            earlier, ours = {**ended["settings"]}, self._design.resolved
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self._file} is not of this version of millrace; remove it to repeat its run, or"
                " choose another --out."
            ) from None
        changed = [k for k in {**earlier, **ours} if earlier.get(k, ...) != ours.get(k, ...)]
        if changed:
            raise ConfigError(
                f"{self._file} is of a run with other settings ({', '.join(changed)}); choose"
                " another --out."
            )
        return ended

    def row(self, *, target: float | None) -> dict[str, Any]:
        """Make the run, unless it has finished, and measure it."""
        design = self._design
        row = {"design": design.name, "preset": design.preset, "seed": self._seed}
        try:
            if self._ended.get("status") != "finished" or not self._dir.is_finished:
                self._make()
            is_finished = self._ended["status"] == "finished"
            measured = measure_run(self._dir, target=target) if is_finished else {}
        except Exception as error:  # noqa: BLE001 - a row like that of any failed run
            reason = str(error) if isinstance(error, MillraceError) else repr(error)
            return self._ended | row | {"status": "failed", "error": reason}
        return self._ended | row | measured

    def _make(self) -> None:
        print(f"{printable(self._design.name)}, seed {self._seed} ...", flush=True)
        path = self._dir.path
        is_whole = not path.exists()
        self._write({})  # so that no command with other settings resumes the run
        arguments = self._design.arguments(seed=self._seed, run_dir=path)
        ended = train_process(arguments, log=path.with_suffix(".log"))._asdict()
        ended |= {} if is_whole else {"peak_mib": None, "peak_gpu_mib": None}  # of a part
        self._write({"status": "failed" if ended["error"] else "finished", **ended})

    def _write(self, ended: Mapping[str, Any]) -> None:
        self._ended = {"settings": self._design.resolved, **ended}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._ended, indent=2) + "\n")


class EndedRun(NamedTuple):
    error: str | None
    peak_mib: float  # host memory of its processes together
    peak_gpu_mib: float | None  # of all GPUs, beyond what was used before; None without a GPU


def train_process(arguments: list[str], *, log: Path) -> EndedRun:
    """The run ends with this process, so that a repeated command finds none that still works."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "millrace", *arguments, "--monitoring.progress=lines"]
    with log.open("w") as output:
        process = subprocess.Popen(
            with_parent_death_signal(command), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            with PeakMemory(process.pid) as memory:
                process.wait()
        finally:
            process.terminate()  # after an interrupt; an ended process is not affected
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    error = (errors or [f"exit code {process.returncode}; see {log}"])[-1]
    error = error if process.returncode else None
    return EndedRun(error, memory.peak_mib, memory.peak_gpu_mib)


class PeakMemory(threading.Thread):
    """Samples the memory of a process and of all that descend from it, while its context lasts."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="peak-memory", daemon=True)
        self.peak_mib = 0.0
        self._pid, self._ended, self._gpu_mib = pid, threading.Event(), [used_gpu_mib()]

    @property
    def peak_gpu_mib(self) -> float | None:
        """The peak of all GPUs, less what was used before; None without a GPU."""
        return max(self._gpu_mib) - self._gpu_mib[0] or None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            self.peak_mib = max(self.peak_mib, sum(map(_pss_kib, _family(self._pid))) / 1024)
            self._gpu_mib.append(used_gpu_mib())
            pause_s = max(_SAMPLE_S, (time.monotonic() - began_s) / _SAMPLE_SHARE)


def used_gpu_mib() -> float:
    """The used memory of all GPUs of this host, as nvidia-smi reports it; 0 without a GPU, or if
    this process sees none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or shutil.which("nvidia-smi") is None:
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
    if not (rows := read_metrics(run_dir.metrics)):
        raise ConfigError(f"{run_dir.path} has no metrics; remove it to repeat its run.")
    last = rows[-1]
    summary = run_dir.read_summary()
    wasted = table(last, "tokens/wasted")
    roles = mean_by_role(total_shares(read_trace(run_dir.trace)))
    engine, trainer = roles.get("engine"), roles.get("trainer")
    sync = {**engine.doing, **engine.waiting} if engine else {}
    seconds, staleness = last["throughput/time_s"], _staleness(rows)
    return {
        "samples_per_s": run_rates(last).get("samples_per_s"),
        "seconds": seconds,
        "time_to_target_s": None if target is None else _time_to(target, rows, summary),
        "accuracy": summary["accuracy_after"],
        "reward": last["reward/mean"],
        "staleness": staleness,
        "mean_staleness": sum(int(age) * share for age, share in staleness.items()),
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
