"""A run with a recipe that branches episodes of an environment function."""

import numpy as np
import pytest
from tiny_classifier import make_tiny_classifier
from tiny_model import make_tiny_model

import millrace as mr
from millrace.environments.replay.recordings import episode_of, read_recordings
from millrace.monitoring.files.metrics import read_metrics


async def two_turns(task: mr.Task, agent: mr.Agent) -> float:
    first = await agent.complete(task.prompt)
    second = await agent.complete(f"{task.prompt}{first.text}+{agent.rng.integers(9)}=")
    return float(len(second.text) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["entropy", "value"])
def test_run_trains_on_branches(tmp_path, by):
    steps = {
        "type": "process_reward_model",
        "model": str(make_tiny_classifier(tmp_path / "judge", head="token", num_labels=2)),
        "label": 1,
        "steps": {"by": "turn"},
    }
    result = mr.train(
        scorers=[steps] if by == "value" else [],
        model=str(make_tiny_model(tmp_path / "model")),
        run_dir=str(tmp_path / "run"),
        tasks=[{"prompt": f"{n}+1="} for n in range(8)],
        environment={"function": two_turns, "recipe": {"type": "pivot", "by": by}},
        sampling={"max_new_tokens": 6},
        rollout={"group_size": 4},
        trainer={"steps": 1, "groups_per_step": 2},
        optimizer={"learning_rate": 1e-3},
        scoring={"workers": 1},
        monitoring={"progress": "off", "record_episodes": 8},
    )
    assert result.episodes == 2 * 4
    for row in read_metrics(result.run_dir / "metrics.jsonl"):
        assert row["staleness/max"] > 0 or row["mismatch/logprob"] < 1e-5
    lines = list(read_recordings(result.run_dir / "episodes" / "step_1.jsonl"))
    for group in {line.group for line in lines}:
        members = [line for line in lines if line.group == group]
        parents = [line.episode.branching.parent for line in members]
        assert sorted(parents, key=str) == [0, 0, 0, None]
        trained = sum(r.num_sampled for m in members for r in episode_of(m.episode).rollouts)
        turns = [turn for member in members for turn in member.episode.turns]
        assert trained == sum(
            len(turn.completion.tokens) - turn.completion.num_shared for turn in turns
        )
        assert np.isfinite([line.advantage for line in members]).all()
