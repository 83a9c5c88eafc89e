"""`millrace plan --calibrate`: real short runs on this machine, and the plan from them."""

import json

import pytest

from millrace.bench.workloads import make_long_tailed_model
from millrace.cli.main import main
from millrace.plan.calibrate import read_calibration

SETTINGS = """
model = "model"
scorers = ["reward.py:distinct"]
tasks = { path = "tasks.jsonl" }
sampling = { max_new_tokens = 16 }
rollout = { group_size = 2 }
scoring = { workers = 1 }
cluster = { threads = 1 }
"""


@pytest.mark.slow
def test_measured_machine_is_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_long_tailed_model(tmp_path / "model", seed=0)
    (tmp_path / "reward.py").write_text(
        "def distinct(completions, **columns):\n    return [len(set(c)) for c in completions]\n"
    )
    tasks = [json.dumps({"prompt": f"task{number}"}) for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks))
    toml = tmp_path / "run.toml"
    toml.write_text(SETTINGS)
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([4, 6, 9, 12, 16]))
    assert main(["plan", str(toml), "--lengths", str(lengths)]) == 2
    assert "This machine was not measured; add --calibrate" in capsys.readouterr().err

    assert main(["plan", str(toml), "--calibrate", "--lengths", str(lengths)]) == 0
    measured = capsys.readouterr().out
    found = read_calibration(tmp_path / "cache/millrace/calibration.json")
    assert found.device == "cpu"
    assert found.decode_s(4, 0) > 0
    assert found.train_s(100, 0) > 0
    assert found.base_mib > 100
    assert "samples per s" in measured

    assert main(["plan", str(toml), "--lengths", str(lengths)]) == 0
    assert capsys.readouterr().out == measured, "a second plan uses the same measurement"
