"""`millrace eval` with real processes."""

import json

import pytest
from project import Command, make_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_models_and_checkpoints_are_evaluated_as_in_their_run(tmp_path):
    held_out = {"path": "tasks.jsonl", "max_tasks": 50, "samples": 2, "solved_at": 0.5}
    project = make_project(
        tmp_path,
        evaluate=held_out,
        trainer={"steps": 2, "groups_per_step": 4},
        checkpoint={"every_steps": 1},
        lora={"rank": 4},
        optimizer={"learning_rate": 1e-2},
    )
    code, _, stderr = Command("train", "run.toml", folder=project).finish(timeout_s=300)
    assert code == 0, stderr
    summary = json.loads((project / "run" / "summary.json").read_text())

    command = Command("eval", "run", "--checkpoints", "all", "--json", "all.json", folder=project)
    code, stdout, stderr = command.finish(timeout_s=300)
    assert code == 0, stderr
    assert "pass@2" in stdout
    first, last = json.loads((project / "all.json").read_text())
    assert (first["step"], last["step"], last["num_tasks"], last["samples"]) == (1, 2, 50, 2)
    # The run itself evaluated the last version with the same seeds.
    assert last["accuracy"] == pytest.approx(summary["accuracy_after"])
    assert last["pass_at"]["2"] == pytest.approx(summary["evaluation_after"]["eval/pass@2"])

    arguments = ("--tasks", "tasks.jsonl", "--scorer", "rewards.py:digits", "--json", "one.json")
    arguments += ("--samples", "2", "--temperature", "1.5")
    settings = ("--sampling.max_new_tokens", "8", "--monitoring.progress", "lines")
    command = Command("eval", "model", *arguments, *settings, folder=project)
    code, _, stderr = command.finish(timeout_s=300)
    assert code == 0, stderr
    (only,) = json.loads((project / "one.json").read_text())
    assert (only["step"], only["num_tasks"], only["num_failed"]) == (None, 50, 0)
    assert 0 < only["reward_mean"] < 1
