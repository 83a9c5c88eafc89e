"""Trackers of services, with their real packages and without a network: `make test-trackers`."""

import importlib.util
import json
from pathlib import Path

import pytest

from millrace.monitoring.trackers import IDS, TrackerProcess

SETTINGS = {"model": {"path": "m"}, "seed": 3}


class Patient(TrackerProcess):
    PATIENCE_S = 300.0  # imports take long on a machine that is busy


def track(run_dir: Path, name: str, *, steps: range, resume_from: int | None = None) -> str:
    """Send steps and an alert as a run does; returns the id of the run."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for folder in ("logs", "rollouts"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    warnings: list[str] = []
    tracker = Patient({"type": name, "project": "p", "name": "first"}, warn=warnings.append)
    tracker.open(run_dir, settings=SETTINGS, resume_from=resume_from)
    for step in steps:
        row = {"prompt": [{"role": "user", "content": "1+1"}], "completion": "2", "score": 1.0}
        (run_dir / "rollouts" / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
        tracker.write(step, {"reward/mean": step / 10, "eval/pass@2": 0.5})
    tracker.alert("The trainer waits.")
    tracker.close()
    assert warnings == [], (run_dir / "logs" / f"tracker-{name}.log").read_text()
    return json.loads((run_dir / IDS).read_text())[name]


@pytest.mark.timeout(600)
def test_trackio_has_metrics_config_episodes_and_alerts_of_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    name = track(tmp_path / "run", "trackio", steps=range(1, 3))
    assert track(tmp_path / "run", "trackio", steps=range(3, 4), resume_from=2) == name
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    logs = SQLiteStorage.get_logs("p", name)
    rewards = {log["step"]: log["reward/mean"] for log in logs if "reward/mean" in log}
    assert rewards == {1: 0.1, 2: 0.2, 3: 0.3}
    tables = [log["episodes"]["_value"] for log in logs if "episodes" in log]
    assert [json.loads(table[0]["completion"]) for table in tables] == ["2", "2", "2"]
    assert SQLiteStorage.get_run_config("p", name)["seed"] == 3
    assert {alert["text"] for alert in SQLiteStorage.get_alerts("p")} == {"The trainer waits."}


@pytest.mark.timeout(600)
def test_wandb_offline_run_has_everything_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = track(tmp_path / "run", "wandb", steps=range(1, 3))
    assert track(tmp_path / "run", "wandb", steps=range(3, 4), resume_from=2) == run_id
    assert track(tmp_path / "other", "wandb", steps=range(1, 2)) != run_id
    first, second = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}"))
    data = (first / f"run-{run_id}.wandb").read_bytes()
    for expected in (b"reward/mean", b"eval/pass@2", b"episodes", b"seed", b"The trainer waits."):
        assert expected in data
    assert list((first / "files").rglob("*.table.json"))
    assert b"reward/mean" in (second / f"run-{run_id}.wandb").read_bytes()


@pytest.mark.timeout(600)
def test_mlflow_run_has_everything_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_id = track(tmp_path / "run", "mlflow", steps=range(1, 3))
    assert track(tmp_path / "run", "mlflow", steps=range(3, 4), resume_from=2) == run_id
    from mlflow import MlflowClient, artifacts  # pyright: ignore[reportMissingImports]

    client = MlflowClient()
    points = client.get_metric_history(run_id, "reward/mean")
    assert [(point.step, point.value) for point in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    run = client.get_run(run_id)
    assert run.data.metrics["eval/pass_at_2"] == 0.5
    assert run.data.tags["alert"] == "The trainer waits."
    root = run.info.artifact_uri
    assert artifacts.load_dict(f"{root}/config.json")["seed"] == 3
    table = artifacts.load_dict(f"{root}/episodes/step_1.json")
    assert '"2"' in str(table["data"])
