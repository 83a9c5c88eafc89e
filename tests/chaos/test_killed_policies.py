"""A run of two policies: killed workers and a killed run cost restarts, and no step of a policy."""

import shutil
from collections.abc import Iterator

import pytest
from killable_run import KillableRun
from project import Command

from millrace.monitoring.files.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVIRONMENT = """
def digits(text):
    return sum(c.isdigit() for c in text) / (len(text) + 1)

async def play(task, agent):
    proposed = await agent.role("proposer").complete("1+")
    solved = await agent.role("solver").complete(task.prompt)
    return {"proposer": digits(proposed.text), "solver": -digits(solved.text)}
"""
STEPS = 6


@pytest.fixture(params=["full", "lora"])
def run(tmp_path, request) -> Iterator[KillableRun]:
    more = {"lora": {"rank": 4}} if request.param == "lora" else {}
    run = KillableRun(
        tmp_path,
        steps=STEPS,
        environment={"function": "play.py:play", "max_turns": 2},
        policies={"proposer": {}, "solver": {"optimizer": {"learning_rate": 1e-3}}},
        sampling={"max_new_tokens": 12},
        supervision={"max_restarts": 20, "hang_timeout_s": 60.0},
        **more,
    )
    (tmp_path / "play.py").write_text(ENVIRONMENT)
    yield run
    run.close()


def test_killed_trainer_and_engine_of_a_policy_are_replaced(run, request):
    run.start()
    run.until(lambda: run.step >= 3)
    # Adapters share the trainer and the engine of the first policy.
    is_lora = "lora" in request.node.callspec.id
    names = ("trainer", "engine-0") if is_lora else ("trainer-solver", "model-solver-0")
    for name in names:
        run.until(lambda name=name: run.worker(name)).kill()
    restarts = run.summary()["restarts"]
    assert restarts == dict.fromkeys(names, 1)
    steps = {path.name for path in (run.path / "checkpoints").iterdir()}
    assert {path.name for path in (run.path / "policies/solver/checkpoints").iterdir()} == steps


def test_killed_run_repeats_the_steps_of_every_policy(run):
    run.start()
    run.until(lambda: run.step >= 3)
    run.kill()
    before = {row["step"]: row for row in read_metrics(run.path / "metrics.jsonl")}
    # As if the run had been killed between the checkpoints of the two policies.
    folder = run.path / "policies" / "solver" / "checkpoints"
    shutil.copytree(next(folder.glob("step_*")), folder / "step_99")
    config = run.project / "run.toml"
    given = config.read_text()
    config.write_text(given.replace("[policies.solver", "[policies.judge"))
    code, _, stderr = Command("train", "run.toml", "--resume", folder=run.project).finish()
    assert code != 0
    assert "was trained with the policies proposer, solver" in stderr
    config.write_text(given)
    run.start("--resume")
    run.summary()
    assert not (folder / "step_99").exists()
    for row in read_metrics(run.path / "metrics.jsonl"):
        for name in ("loss", "policies/proposer/loss", "policies/solver/loss", "reward/mean"):
            assert row["step"] not in before or row[name] == before[row["step"]][name]
