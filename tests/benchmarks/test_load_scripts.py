"""Scripts that people run by hand, as commands of their own in small sizes: those that measure
servers and adapters, and an example."""

import json
import os
import statistics
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


def test_numbers_of_adapters_are_trained_one_after_the_other(tmp_path: Path):
    args = ("--adapters", 1, 2, "--seconds", 3, "--batch", 1, "--rank", 2)
    rows = measured("benchmarks/training_api_load.py", *args, file=tmp_path / "rows.json")
    assert [row["tenants"] for row in rows] == [1, 2]
    for row in rows:
        assert row["samples_per_s"] > 0
        # No tenant samples.
        assert {*row["latency_ms"]} == {"forward_backward", "optim_step"}


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


HOSTILE = {
    "wrong list items": 400,
    "unknown fields": 413,
    "enum": 413,
    "gzip bomb": 415,
    "objects": 400,
    "strings": 400,
    "tokens": 400,
    "wrong token": 400,
    "long text": 400,
    "large reply": 200,
    "long message": 400,
}


def test_health_is_answered_during_hostile_requests(tmp_path: Path):
    """Compared with a server at rest in the same run: published times depend on the machine."""
    args = ("stalls", "--seconds", 1.5)
    found = measured("benchmarks/serving_load.py", *args, file=tmp_path / "result.json")
    rests = [found.pop("nothing"), found.pop("nothing, at the end")]
    assert {kind: own["statuses"] for kind, own in found.items()} == {
        kind: [status] for kind, status in HOSTILE.items()
    }
    # Each of these takes time, and /health is answered meanwhile, not only between two of them.
    for kind in ("tokens", "wrong token", "long text", "large reply", "long message"):
        assert found[kind]["count"] > 3 * found[kind]["requests"] > 0, (kind, found[kind])
    for kind, own in found.items():
        assert own["requests"] > 0
        assert own["p99"] < 30 * max(rest["p99"] for rest in rests), (kind, own, rests)


def test_small_requests_get_their_share_beside_large_ones(tmp_path: Path):
    args = ("fairness", "--rounds", 3)
    found = measured("benchmarks/serving_load.py", *args, file=tmp_path / "result.json")
    # Without a request of one token, which is one pass, and waits for one of any length.
    by_kind = {
        kind: statistics.median(ratio for size, ratio in own["ratio"].items() if size != "1")
        for kind, own in found.items()
    }
    assert len(by_kind) == 6
    # The goal is 3. On a machine with more work than cores, an engine that always computes gets
    # fewer turns than one that often waits. A request that waits for a whole large one takes more
    # than 100 times as long.
    assert statistics.median(by_kind.values()) < 6, by_kind
    slowest = {kind: own["slowest_ratio"] for kind, own in found.items()}
    assert max(slowest.values()) < 60, slowest
