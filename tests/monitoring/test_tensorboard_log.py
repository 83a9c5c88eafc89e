import sys
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.monitoring.files.tensorboard import TensorBoardLog


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_numbers_become_scalars_and_tables_become_folders(tmp_path):
    log = TensorBoardLog(tmp_path)
    row = {"reward_mean": 0.25, "loss": float("nan"), "score_parts": {"correct": 0.5}}
    log.write(1, row)
    log.write(2, row)
    log.close()
    assert read_scalars(tmp_path) == {
        "reward_mean": [(1, 0.25), (2, 0.25)],
        "score_parts/correct": [(1, 0.5), (2, 0.5)],
    }


def test_resume_replaces_the_steps_that_are_trained_again(tmp_path):
    log = TensorBoardLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, {"reward_mean": 0.0})
    log.close()
    resumed = TensorBoardLog(tmp_path, resume_from=2)
    resumed.write(3, {"reward_mean": 1.0})
    resumed.close()
    assert read_scalars(tmp_path)["reward_mean"] == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError, match=r"pip install 'millrace\[tensorboard\]'"):
        TensorBoardLog(tmp_path)
