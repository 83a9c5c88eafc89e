"""A run of an environment with several turns and its own rewards, without scorers."""

import asyncio

import numpy as np
import pytest
from metrics_page import unknown_metrics
from tiny_model import make_tiny_model

import millrace as mr
from millrace.core.errors import ConfigError
from millrace.environments.function_environment import rerun
from millrace.environments.replay.recordings import episode_of, read_recordings
from millrace.models.directory import load_tokenizer
from millrace.monitoring.files.metrics import read_metrics, table


async def two_turns(task: mr.Task, agent: mr.Agent) -> dict[str, float]:
    first = await agent.role("asker").complete(task.prompt)
    second = await agent.role("asker").complete(f"{task.prompt}{first.text}+1=")
    answer = await agent.role("answerer").complete("7")
    return {"asker": float("1" in second.text), "answerer": float(len(answer.text) % 2)}


@pytest.mark.slow
def test_run_trains_on_rewards_of_the_environment(tmp_path):
    result = mr.train(
        model=str(make_tiny_model(tmp_path / "model")),
        run_dir=str(tmp_path / "run"),
        tasks=[{"prompt": f"{n}+1="} for n in range(8)],
        eval_tasks=[{"prompt": "9+1="}],
        environment={"function": two_turns, "max_turns": 3},
        sampling={"max_new_tokens": 6},
        rollout={"group_size": 4, "oversample": 1, "selection": "fastest"},
        trainer={"steps": 2, "groups_per_step": 2},
        optimizer={"learning_rate": 1e-3},
        scoring={"workers": 1},
        monitoring={"progress": "off", "record_episodes": 2},
    )
    assert result.episodes == 2 * 2 * 4
    assert result.accuracy_after is not None
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert unknown_metrics(rows[-1]) == []
    assert len(rows) == 2
    for row in rows:
        assert row["turns/mean"] == 3.0
        assert set(table(row, "rewards", suffix="/mean")) == {
            "environment.asker",
            "environment.answerer",
        }
        # On-policy, engine and trainer compute the same logprobs.
        assert row["staleness/max"] > 0 or row["mismatch/logprob"] < 1e-5
    for step in (1, 2):
        lines = list(read_recordings(result.run_dir / "episodes" / f"step_{step}.jsonl"))
        assert [line.score for line in lines] == [np.mean([*line.parts.values()]) for line in lines]
        tokenizer = load_tokenizer(str(lines[0].model))
        for line in lines:
            again = asyncio.run(rerun(line.episode, two_turns, tokenizer=tokenizer))
            assert again.reward == line.episode.reward
            # One rollout per agent, and one more if a text was tokenised differently.
            assert len(again.rollouts) == len(episode_of(line.episode).rollouts) >= 2


def test_fastest_episodes_need_an_environment_function(tmp_path):
    with pytest.raises(ConfigError, match=r"'fastest' cancels episodes of an environment, and"):
        mr.train(
            model=str(make_tiny_model(tmp_path / "model")),
            run_dir=str(tmp_path / "run"),
            tasks=[{"prompt": "1+1="}],
            scorers=[lambda completions, **columns: [0.0 for _ in completions]],
            rollout={"oversample": 1, "selection": "fastest"},
        )
