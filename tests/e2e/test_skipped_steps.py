"""Runs whose loss is NaN at chosen steps."""

import json
from pathlib import Path

import pytest
from project import Command, make_project

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.report.summary import summary_rows

LOSSES = '''
from dataclasses import dataclass, field

from millrace.training.losses.loss import aggregate


@dataclass(frozen=True, kw_only=True)
class NanLoss:
    """NaN at the given calls. In these runs a step is one call."""

    bad: tuple[int, ...] = ()
    calls: list[int] = field(default_factory=list)

    def __call__(self, tokens):
        self.calls.append(0)
        factor = float("nan") if len(self.calls) in self.bad else 1.0
        objective = factor * tokens.advantages * tokens.trainer_logprobs
        return -aggregate(objective, tokens, by="token"), {}
'''


def nan_project(folder: Path, *, bad: list[int], steps: int) -> Path:
    (folder / "losses.py").write_text(LOSSES)
    loss = {"type": "losses.py:NanLoss", "bad": bad}
    return make_project(folder, loss=loss, trainer={"steps": steps})


@pytest.mark.slow
def test_run_continues_after_skipped_steps_and_saves_their_batches(tmp_path):
    nan_project(tmp_path, bad=[2, 3, 5], steps=6)
    run_dir = mr.train(tmp_path / "run.toml", monitoring={"progress": "off"}).run_dir
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["skipped/updates"] for row in rows] == [0, 1, 1, 0, 1, 0]
    assert [row["loss"] is None for row in rows] == [False, True, True, False, True, False]
    assert rows[-1]["skipped/steps"] == 3
    assert dict(summary_rows(run_dir))["steps skipped"].startswith("3, ")
    assert {path.name for path in (run_dir / "skipped").iterdir()} == {
        f"step_{step}.jsonl" for step in (2, 3, 5)
    }
    saved = [json.loads(line) for line in (run_dir / "skipped/step_3.jsonl").open()]
    assert len(saved) == 4 * 4  # groups of a step, episodes of a group
    assert sum(row["score"] for row in saved) / 16 == pytest.approx(rows[2]["reward/mean"])


@pytest.mark.slow  # tests/monitoring/ checks the count and the message
def test_three_skipped_steps_in_a_row_end_the_run(tmp_path):
    nan_project(tmp_path, bad=[2, 3, 4], steps=9)
    run_dir = tmp_path / "run"
    code, _, error = Command("train", "run.toml", folder=tmp_path).finish()
    assert code == 1
    assert "Steps 2, 3, 4 were skipped in a row, the last with loss nan" in error
    assert "step_4.jsonl" in error
    assert len(list((run_dir / "skipped").iterdir())) == 3
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["step"] == 4
