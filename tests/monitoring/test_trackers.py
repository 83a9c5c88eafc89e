import importlib.util
import json
import time
from pathlib import Path

import file_tracker
import psutil
import pytest

from millrace.core.errors import ConfigError
from millrace.monitoring.trackers import TensorBoardTracker, TrackerProcess, build_tracker


def opened(directory: Path, *, resume_from: int | None = None) -> TensorBoardTracker:
    tracker = TensorBoardTracker()
    tracker.open(directory, settings={}, resume_from=resume_from)
    return tracker


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_tensorboard_metrics_become_scalars(tmp_path):
    tracker = opened(tmp_path)
    for step in (1, 2):
        tracker.write(step, {"reward/mean": 0.25, "rewards/correct/mean": 0.5})
    tracker.close()
    assert read_scalars(tmp_path) == {
        "reward/mean": [(1, 0.25), (2, 0.25)],
        "rewards/correct/mean": [(1, 0.5), (2, 0.5)],
    }


def test_tensorboard_resume_replaces_the_steps_that_are_trained_again(tmp_path):
    tracker = opened(tmp_path)
    for step in (1, 2, 3):
        tracker.write(step, {"reward/mean": 0.0})
    tracker.close()
    resumed = opened(tmp_path, resume_from=2)
    resumed.write(3, {"reward/mean": 1.0})
    resumed.close()
    assert read_scalars(tmp_path)["reward/mean"] == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_missing_tensorboard_package_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "tensorboard" else find_spec(n)
    )
    with pytest.raises(ConfigError, match=r"pip install 'millrace\[tensorboard\]'"):
        TensorBoardTracker()


def test_tracker_is_built_from_its_table():
    assert isinstance(build_tracker({"type": "tensorboard"}), TensorBoardTracker)
    reference = f"{Path(file_tracker.__file__)}:FileTracker"
    assert vars(build_tracker({"type": reference, "label": "x"}))["label"] == "x"


def test_unknown_tracker_type_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        build_tracker({"type": "tensorbord"})


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_service_without_its_package_names_the_extra(name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip("it is installed")
    with pytest.raises(ConfigError, match=rf"pip install 'millrace\[{name}\]'"):
        build_tracker({"type": name})


class ShortQueue(TrackerProcess):
    MAX_QUEUED = 3


class Impatient(ShortQueue):
    PATIENCE_S = 0.5


def started(tmp_path: Path, kind=TrackerProcess, **settings) -> tuple[TrackerProcess, list[str]]:
    """A tracker process, and the warnings of the run."""
    (tmp_path / "logs").mkdir()
    warnings: list[str] = []
    table = {"type": f"{Path(file_tracker.__file__)}:FileTracker", "label": "calls", **settings}
    tracker = kind(table, warn=warnings.append)
    tracker.open(tmp_path, settings={}, resume_from=None)
    return tracker, warnings


@pytest.mark.slow
def test_episodes_of_a_step_follow_its_metrics(tmp_path):
    tracker, warnings = started(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        row = {"prompt": f"p{step}", "score": 0.5, "rollouts": [{"ids": [1, 2]}]}
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text(json.dumps(row) + "\n")
        tracker.write(step, {"loss": 0.5})
    tracker.close()
    calls = file_tracker.read_lines(tmp_path / "calls.jsonl")
    assert [call[0] for call in calls] == [
        "open",
        "write",
        "write",
        *["write_episodes"] * 2,
        "close",
    ]
    assert [call[2][0]["prompt"] for call in calls if call[0] == "write_episodes"] == ["p1", "p2"]
    assert "rollouts" not in calls[3][2][0]
    assert warnings == []


@pytest.mark.slow
def test_tracker_that_hangs_never_blocks_the_run_and_its_lost_points_are_counted(tmp_path):
    others = psutil.Process().children()
    tracker, warnings = started(tmp_path, kind=Impatient, fails="write!")
    for step in range(20):  # more than the queue holds
        tracker.write(step, {"loss": 0.5})
        time.sleep(0.1)
    tracker.close()
    assert len(warnings) == 2
    assert "fails, and the run continues: no reply" in warnings[0]
    assert "did not get 20 of 20 points" in warnings[1]
    assert [child for child in psutil.Process().children() if child not in others] == []


@pytest.mark.parametrize("num_points", [2, 3, 20])  # one place is free; none is; points are lost
def test_tracker_behind_a_full_queue_is_closed(tmp_path, num_points):
    tracker, _ = started(tmp_path, kind=ShortQueue)
    for step in range(num_points):
        tracker.write(step, {"loss": 0.5})
    tracker.close()
    opened, *_, last, closed = file_tracker.read_lines(tmp_path / "calls.jsonl")
    assert [opened[0], last[0], closed] == ["open", "write", ["close"]]


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "num_lost"), [("open", 3), ("write", 3), ("close", 0)])
def test_tracker_that_fails_is_reported_once(tmp_path, fails, num_lost):
    tracker, warnings = started(tmp_path, fails=fails)
    for step in range(3):
        tracker.write(step, {"loss": 0.5})
    tracker.close()
    tracker.alert("later")
    assert f"ConnectionError: {fails} is down" in "".join(warnings)
    assert [f"did not get {num_lost} of 3" in text for text in warnings].count(True) == (
        num_lost > 0
    )


@pytest.mark.slow
def test_killed_tracker_is_reported(tmp_path):
    others = psutil.Process().children()
    tracker, warnings = started(tmp_path)
    tracker.write(1, {"loss": 0.5})
    while not (tmp_path / "calls.jsonl").is_file():
        time.sleep(0.02)
    for child in psutil.Process().children():
        if child not in others:
            child.kill()
            child.wait()
    tracker.write(2, {"loss": 0.5})
    tracker.close()
    assert "its process has ended" in warnings[-1]
