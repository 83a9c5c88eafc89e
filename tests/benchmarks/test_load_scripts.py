"""Scripts that people run by hand, as commands of their own in small sizes: those that measure
servers and adapters, and an example."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.monitoring.files.metrics import read_metrics

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(script: str, *args: object) -> str:
    """Its output; fails if the command does."""
    command = [sys.executable, str(ROOT / script), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(script: str, *args: object, file: Path) -> Any:
    run(script, *args, "--json", file)
    return json.loads(file.read_text())


def test_self_play_trains_both_roles(tmp_path: Path):
    sizes = ("--steps", 2, "--examples", 64)
    roles = ("--policies", "--lora", "--lags", 1)
    run("examples/self_play.py", "--run-dir", tmp_path / "run", *sizes, *roles)
    (file,) = tmp_path.rglob("metrics.jsonl")
    assert [row["step"] for row in read_metrics(file)] == [1, 2]


@pytest.mark.parametrize("kind", ["equal", "unequal"])
def test_tenants_train_and_sample_over_the_training_api(tmp_path: Path, kind: str):
    args = ["--tenants", 2, "--seconds", 4, "--batch", 1, "--rank", 2]
    args += ["--unequal"] if kind == "unequal" else []
    (row,) = measured("benchmarks/training_api_load.py", *args, file=tmp_path / "rows.json")
    # A slow machine has no time left for samples.
    assert {"forward_backward", "optim_step"} <= {*row["latency_ms"]}
    assert all(times["requests"] > 0 for times in row["latency_ms"].values())


def test_adapters_are_measured_merged_and_unmerged(tmp_path: Path):
    sizes = ("--model", "tiny", "--rank", 2, "--batch", 4, "--new-tokens", 2)
    device = ("--device", "cpu", "--dtype", "float32")
    rows = measured("benchmarks/adapters.py", *sizes, *device, file=tmp_path / "rows.json")
    names = ["none", "merged", "unmerged", "4 unmerged", "8 unmerged"]
    assert [row["adapters"] for row in rows] == names
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_clients_that_leave_a_server_leave_nothing_behind(tmp_path: Path):
    args = ("clients", "--clients", 4, "--rounds", 1)
    assert measured("benchmarks/serving_load.py", *args, file=tmp_path / "result.json")
