"""Runs on servers that Millrace starts; here each is a fake (fake_vllm.py, fake_sglang.py)."""

import json
import threading
import time
from pathlib import Path

import fake_sglang
import psutil
import pytest
from digits import TASKS, share_of_digits
from fake_vllm import write_python

import millrace as mr
from millrace.core.errors import RunFailed
from millrace.monitoring.files.metrics import read_metrics

pytestmark = pytest.mark.slow


def train(
    model: Path, run_dir: Path, *, python: Path, steps: int, kind: str = "vllm", **settings
) -> mr.RunResult:
    kv = "recompute" if kind == "sglang" else "keep"
    return mr.train(
        {
            "model": str(model),
            "run_dir": str(run_dir),
            "sampling": {"max_new_tokens": 24},
            "rollout": {"group_size": 4},
            "trainer": {"steps": steps, "groups_per_step": 4},
            "optimizer": {"learning_rate": 3e-3},
            "engine": {"type": kind, "kv": kv, "options": {"python": str(python)}},
            "cluster": {"threads": 1},
            "scoring": {"workers": 1},
            "monitoring": {"progress": "off"},
            **settings,
        },
        tasks=TASKS,
        scorers=[share_of_digits],
    )


def servers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if {"--uds", "--model-path"} & {*child.cmdline()}]


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapter"])
@pytest.mark.parametrize(
    ("kind", "python"), [("vllm", write_python), ("sglang", fake_sglang.write_python)]
)
def test_killed_server_is_replaced(model, tmp_path, sections, kind, python):
    def kill() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.05)
        for server in servers():
            server.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    train(model, tmp_path / "run", python=python(tmp_path), steps=8, kind=kind, **sections)
    killer.join()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    on_policy = [row["mismatch/logprob"] for row in rows if row["staleness/max"] == 0]
    assert max(on_policy) < 1e-4  # the first step is
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"]["engine-0"] >= 1
    assert servers() == []


def test_run_on_torn_weights_ends_with_both_numbers(model, tmp_path):
    python = write_python(tmp_path, faults=["torn"])
    once = {"max_restarts": 0}
    with pytest.raises(RunFailed, match=r"-\d\.\d+ in this engine and -\d\.\d+ in the trainer"):
        train(model, tmp_path / "run", python=python, steps=4, supervision=once)
    assert servers() == []
