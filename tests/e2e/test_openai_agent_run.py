"""A run whose environment is the program of examples/openai_agent."""

import json

import pytest
from project import REPOSITORY, Command, make_project

SCORE = """
def prints_digits(task, result):
    return sum(c.isdigit() for c in result.stdout) / (len(result.stdout) + 1)
"""


@pytest.mark.slow
def test_run_trains_on_a_program_that_uses_the_openai_package(tmp_path):
    agent = REPOSITORY / "examples" / "openai_agent" / "agent.py"
    make_project(
        tmp_path,
        environment={"command": ["python", str(agent)], "score": "score.py:prints_digits"},
        rollout={"group_size": 2, "max_running_groups": 2},
        trainer={"groups_per_step": 2, "steps": 2},
        cluster={"threads": 1},
        sampling={"max_new_tokens": 6},
    )
    (tmp_path / "score.py").write_text(SCORE)
    code, _, stderr = Command("train", "run.toml", folder=tmp_path).finish()
    assert code == 0, stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    samples = (tmp_path / "run/rollouts/step_2.jsonl").read_text().splitlines()
    assert samples
    assert not (tmp_path / "run/logs/programs.log").exists()
