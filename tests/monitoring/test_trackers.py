import importlib.util
from pathlib import Path

import fakes
import pytest

from millrace.core.errors import ConfigError
from millrace.monitoring.trackers import TensorBoardTracker, build_trackers


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


def test_trackers_are_built_from_tables():
    reference = f"{Path(fakes.__file__)}:RecordingTracker"
    first, second = build_trackers([{"type": "tensorboard"}, {"type": reference, "label": "x"}])
    assert isinstance(first, TensorBoardTracker)
    assert vars(second)["label"] == "x"


def test_unknown_tracker_type_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        build_trackers([{"type": "tensorbord"}])
