"""A system clock that is set back and forth while a run goes on."""

import ast
import json
import os
from pathlib import Path

import pytest
from project import REPOSITORY
from torn_run import TornRun

# What people or other machines read as a time of day; nothing waits or decides by it.
TIMES_OF_DAY = {
    "core/spans.py",
    "scoring/services/endpoint.py",
    "serving/api/chat.py",
    "serving/api/completions.py",
    "serving/served_model.py",
    "monitoring/trackers.py",
    "monitoring/files/trace.py",
}
JUMPING_CLOCK = """
import itertools, time

real, jumps = time.time, itertools.cycle((0, 3600, -7200, 86400))
time.time = lambda: real() + next(jumps)
open("jumped", "a").write("x")
"""


def test_only_what_is_shown_reads_the_system_clock():
    package = REPOSITORY / "src" / "millrace"
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    }
    assert asking == TIMES_OF_DAY


@pytest.mark.slow
def test_a_run_under_a_clock_that_jumps_at_every_look_ends_as_any_other(tmp_path: Path):
    run = TornRun(tmp_path, steps=4, cluster={"stall_timeout_s": 60.0})
    # Python runs it first, in every process that finds the folder on its path.
    (run.project / "sitecustomize.py").write_text(JUMPING_CLOCK)
    run.start(env={"PYTHONPATH": f"{run.project}{os.pathsep}{REPOSITORY / 'src'}"})
    try:
        run.summary()
    finally:
        run.close()
    assert len((run.project / "jumped").read_text()) >= 4  # controller and workers
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert 0 < rows[0]["time_s"] < rows[-1]["time_s"] < 120
    assert all(
        0 <= row["busy/engine"] <= 1 and row["throughput/samples_per_s"] > 0 for row in rows[1:]
    )
