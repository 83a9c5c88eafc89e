"""A system clock that is set back and forth during a run."""

import ast
import json
import os
from pathlib import Path

import pytest
from killable_run import KillableRun
from project import REPOSITORY

# Modules that show or send a time of day. No wait and no decision depends on it, except that saved
# states of the training API expire: when, must outlast the process.
DISPLAYED_TIMES = {
    "controller/reporting.py",
    "core/spans.py",
    "dashboard/runs.py",
    "scoring/services/endpoint.py",
    "serving/api/completions.py",
    "serving/served_model.py",
    "serving/tinker/request_log.py",
    "serving/tinker/service.py",
    "serving/tinker/states.py",
    "serving/tinker/tenants.py",
    "monitoring/monitor.py",
    "monitoring/trackers.py",
    "monitoring/files/trace.py",
}
JUMPING_CLOCK = """
import itertools, os, time

real, jumps = time.time, itertools.cycle((0, 3600, -7200, 86400))

def jumping():
    with open(f"jumped-{os.getpid()}", "w"):
        return real() + next(jumps)

time.time = jumping
"""


def test_only_displayed_times_read_the_system_clock():
    package = REPOSITORY / "src" / "millrace"
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
    }
    assert readers == DISPLAYED_TIMES


@pytest.mark.slow
def test_run_is_unaffected_by_a_jumping_system_clock(tmp_path: Path):
    run = KillableRun(tmp_path, steps=4)
    # Python runs sitecustomize.py first, in every process with the folder on its path.
    (run.project / "sitecustomize.py").write_text(JUMPING_CLOCK)
    run.start(env={"PYTHONPATH": f"{run.project}{os.pathsep}{REPOSITORY / 'src'}"})
    try:
        run.summary()
    finally:
        run.close()
    assert len(list(run.project.glob("jumped-*"))) >= 4  # controller and workers
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert 0 < rows[0]["time_s"] < rows[-1]["time_s"] < 120
    assert all(
        0 <= row["busy/engine"] <= 1 and row["throughput/samples_per_s"] > 0 for row in rows[1:]
    )
