"""benchmarks/distillation.py in its smallest size."""

import json
import sys
from pathlib import Path

import distillation
import pytest


def test_runs_differ_only_in_their_scorers():
    tables = distillation.scorer_tables(Path("teacher"))
    assert list(tables) == ["function", "teacher", "self_teacher"]
    assert "scorers" not in distillation.SETTINGS


@pytest.mark.slow
def test_script_reports_each_run_before_and_after(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    sizes = ["--steps", "1", "--examples", "32", "--teacher-examples", "32", "--held-out", "4"]
    monkeypatch.setattr(sys, "argv", ["distillation.py", *sizes, "--json", str(file)])
    distillation.main()
    teacher, *rows = json.loads(file.read_text())
    assert 0 <= teacher["accuracy"] <= 1
    assert [row["run"] for row in rows] == ["function", "teacher", "self_teacher"]
    assert all(row["kl_before"] > 0 and row["kl"] > 0 for row in rows)
    assert [row["episodes"] for row in rows] == [128] * 3
