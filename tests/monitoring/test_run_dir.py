import json
import math
import subprocess
import sys

import pytest

from millrace.config import RunConfig, load_config
from millrace.core.errors import ConfigError
from millrace.monitoring.run_dir import RunDir

CONFIG = load_config({"model": "some/model"})


def opened(path, *, config: RunConfig = CONFIG, resume: bool = False) -> RunDir:
    run_dir = RunDir(path)
    run_dir.open(config, resume=resume)
    return run_dir


def with_a_step(path) -> RunDir:
    run_dir = opened(path)
    run_dir.metrics.write_text('{"step": 1}\n')
    run_dir.close()
    return run_dir


def test_open_makes_the_layout(tmp_path):
    run_dir = opened(tmp_path / "runs" / "x")
    assert run_dir.exists
    assert run_dir.is_running
    assert not run_dir.is_finished
    assert {path.name for path in run_dir.path.iterdir()} == {
        "config.toml",
        "checkpoints",
        "rollouts",
        "logs",
        "run.lock",
    }


def test_config_toml_reads_back_as_the_same_settings_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks.jsonl").touch()
    config = load_config(
        {
            "run_dir": "runs/x",
            "model": "model",
            "tasks": {"path": "tasks.jsonl"},
            "scorers": [
                {"function": "rewards.py:reward", "weight": 0.5},
                {"type": "json_schema", "path": "schema.json"},
            ],
            "loss": {"type": "clipped", "high": 0.3, "low": None, "max_ratio": math.inf},
            "sampling": {"stop": ["\n", '"']},
            "weights": {"directory": "shared"},
        }
    )
    run_dir = opened(tmp_path / "runs" / "x", config=config)
    read_back = load_config(run_dir.config)
    assert read_back.run_dir == str(tmp_path / "runs" / "x")
    assert read_back.model.path == str(tmp_path / "model")
    assert read_back.tasks.path == str(tmp_path / "tasks.jsonl")
    assert read_back.scorers[0].function == f"{tmp_path}/rewards.py:reward"
    verifier = {"type": "json_schema", "path": str(tmp_path / "schema.json")}
    assert read_back.scorers[1].type_settings == verifier
    assert read_back.loss == {"type": "clipped", "high": 0.3, "max_ratio": math.inf}
    assert read_back.sampling == config.sampling
    assert read_back.weights.directory == str(tmp_path / "shared")
    assert read_back.trainer == config.trainer


def test_a_hub_name_stays_a_hub_name(tmp_path):
    assert load_config(opened(tmp_path / "x").config).model.path == "some/model"


def test_a_run_is_not_overwritten(tmp_path):
    with_a_step(tmp_path / "x")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "x")
    assert str(caught.value) == (
        f"{tmp_path}/x already holds a run; choose another run_dir, or resume it with --resume."
    )


def test_run_without_a_step_may_start_again(tmp_path):
    opened(tmp_path / "x").close()
    again = opened(tmp_path / "x")
    assert again.is_running


def test_resume_keeps_files_and_removes_the_old_summary(tmp_path):
    run_dir = with_a_step(tmp_path / "x")
    run_dir.write_summary({"seconds": 1.0})
    resumed = opened(tmp_path / "x", resume=True)
    assert resumed.metrics.read_text() == '{"step": 1}\n'
    assert not resumed.is_finished


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="x holds no run to resume; omit --resume"):
        opened(tmp_path / "x", resume=True)


def test_someone_elses_config_toml_is_not_overwritten(tmp_path):
    (tmp_path / "config.toml").write_text("mine = true\n")
    with pytest.raises(ConfigError, match="was not written by a run; choose another run_dir"):
        opened(tmp_path)
    assert (tmp_path / "config.toml").read_text() == "mine = true\n"


def test_a_run_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=r"run_dir = '.*x' cannot be used: "):
        opened(tmp_path / "x")


def test_a_second_process_cannot_join_a_running_run(tmp_path):
    with_a_step(tmp_path / "x")
    holder = opened(tmp_path / "x", resume=True)
    script = (
        "import sys; from millrace.monitoring.run_dir import RunDir\n"
        "from millrace.config import load_config\n"
        "print(RunDir(sys.argv[1]).is_running)\n"
        "RunDir(sys.argv[1]).open(load_config({'model': 'm'}), resume=True)\n"
    )
    command = [sys.executable, "-c", script, str(holder.path)]
    while_held = subprocess.run(command, capture_output=True, text=True, check=False)
    assert while_held.stdout == "True\n"
    assert "belongs to a run that is still running (process " in while_held.stderr
    holder.close()
    after = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (after.stdout, after.stderr) == ("False\n", "")


def test_summary_is_strict_json(tmp_path):
    run_dir = opened(tmp_path / "x")
    run_dir.write_summary({"accuracy_after": float("nan"), "seconds": 2})
    assert json.loads(run_dir.summary.read_text()) == {"accuracy_after": None, "seconds": 2}


def test_checkpoints_are_listed_by_step_without_unfinished_ones(tmp_path):
    run_dir = opened(tmp_path / "x")
    for name in ("step_20", "step_3", "step_100.partial", "other"):
        (run_dir.checkpoints / name).mkdir()
    assert [path.name for path in run_dir.checkpoint_paths] == ["step_3", "step_20"]


def test_remove_run_leaves_other_files_alone(tmp_path):
    run_dir = with_a_step(tmp_path / "x")
    (run_dir.path / "notes.txt").write_text("mine")
    run_dir.remove_run()
    assert [path.name for path in run_dir.path.iterdir()] == ["notes.txt"]
    opened(tmp_path / "x")


def test_remove_run_refuses_a_running_run(tmp_path):
    holder = opened(tmp_path / "x")
    with pytest.raises(ConfigError, match="still running"):
        RunDir(tmp_path / "x").remove_run()
    assert holder.exists
