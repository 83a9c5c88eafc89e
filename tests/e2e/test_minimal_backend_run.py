"""Runs on an engine backend without any capability, and with a transport of the user."""

from pathlib import Path

import pytest
from digits import TASKS, share_of_digits

import millrace as mr
from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import read_metrics

TESTS = Path(__file__).parents[1]
BACKEND = f"{TESTS / 'minimal_backend.py'}:MinimalBackend"
TRANSPORT = f"{TESTS / 'file_transport.py'}:FileTransport"


def train(model: Path, run_dir: Path, *, steps: int, **settings) -> mr.RunResult:
    return mr.train(
        {
            "model": str(model),
            "run_dir": str(run_dir),
            "sampling": {"max_new_tokens": 12},
            "rollout": {"group_size": 4},
            "trainer": {"steps": steps, "groups_per_step": 4},
            "optimizer": {"learning_rate": 3e-3},
            "engine": {"type": BACKEND},
            "cluster": {"threads": 1},
            "weights": {"interrupt": "drain", "transport": TRANSPORT},
            "journal": {"partial_every_s": 0},
            "scoring": {"workers": 1},
            "monitoring": {"progress": "off"},
        },
        tasks=TASKS,
        scorers=[share_of_digits],
        **settings,
    )


def test_run_trains_on_a_backend_without_capabilities(model, tmp_path):
    result = train(model, tmp_path / "run", steps=2, buffer={"max_staleness": 0})
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    # On-policy, engine and trainer compute the same logprobs.
    assert max(row["mismatch/logprob"] for row in rows) < 1e-4
    assert result.episodes == 2 * 4 * 4
    assert (result.run_dir / "weights").is_dir(), "files of the transport were there"


def test_a_class_that_is_no_transport_is_refused_before_the_start(model, tmp_path):
    with pytest.raises(ConfigError, match=r"'pathlib:Path' is not a Transport"):
        train(model, tmp_path / "run", steps=2, weights={"transport": "pathlib:Path"})


@pytest.mark.slow
def test_rewards_rise_on_a_backend_without_capabilities(model, tmp_path):
    result = train(
        model,
        tmp_path / "run",
        steps=24,
        eval_tasks=TASKS[:8],
        engine={"type": BACKEND, "count": 2},
    )
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-6:]) > sum(rewards[:6])
    assert max(row["staleness/max"] for row in rows) <= 2
