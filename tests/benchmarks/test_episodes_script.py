"""benchmarks/episodes.py with few episodes."""

import json
from pathlib import Path

import episodes
import pytest


@pytest.mark.slow
def test_episodes_finish_in_the_controller_and_in_a_worker(tmp_path: Path, warm_fork_server: None):
    rows = tmp_path / "rows.json"
    sizes = "--episodes 16 --turns 1 --sample-s 0.01 --tool-s 0.01 --warm-up-s 1 --measure-s 1"
    assert episodes.main([*sizes.split(), "--workers", "0", "1", "--json", str(rows)]) == 0
    assert [row["workers"] for row in json.loads(rows.read_text())] == [0, 1]
    assert all(row["turns_per_s"] > 0 for row in json.loads(rows.read_text()))
