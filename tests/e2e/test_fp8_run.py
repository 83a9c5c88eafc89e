"""A run whose engine computes in FP8 and caches KV in FP8, with a trainer that does neither."""

import pytest
from digits import TASKS, share_of_digits

import millrace as mr
from millrace.monitoring.files.metrics import read_metrics


@pytest.fixture(scope="module")
def rows(model, tmp_path_factory) -> list[dict]:
    """Metrics of the steps. The probe compares each swap with the trainer's weights."""
    result = mr.train(
        model=str(model),
        run_dir=str(tmp_path_factory.mktemp("runs") / "run"),
        tasks=TASKS,
        scorers=[share_of_digits],
        sampling={"max_new_tokens": 24},
        rollout={"group_size": 4},
        trainer={"steps": 12, "groups_per_step": 4},
        optimizer={"learning_rate": 3e-3},
        engine={
            "max_sequences": 32,
            "options": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        },
        weights={"probe": True},
        cluster={"threads": 1},
        scoring={"workers": 1},
        monitoring={"progress": "off"},
    )
    return [*read_metrics(result.run_dir / "metrics.jsonl")]


def test_run_in_fp8_learns(rows):
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_recorded_logprobs_are_those_of_the_fp8_engine_and_their_mismatch_is_reported(rows):
    # In float32, engine and trainer agree to 1e-5 on fresh tokens.
    assert all(row["mismatch/logprob"] > 1e-4 for row in rows)
    assert rows[0]["mismatch/logprob"] < 0.1
