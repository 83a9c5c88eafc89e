"""A run of two policies: killed workers and a killed run cost restarts, and no step of a policy."""

import json
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
# The solver of an earlier version speaks first.
AGAINST_PAST = """
async def against_past(task, agent):
    role = agent.role("past", model="solver", lag=2)
    past = await role.complete("1+", temperature=0.0)
    versions = {int(version) for version in past.exchange.completion.versions}
    with open("past.txt", "a") as file:
        file.write(f"{min(versions)} {max(versions)} {past.text}\\n")
    return await play(task, agent)
"""
# Groups that the proposer's versions 2 and 5 play train no solver.
UNEVEN = """
async def uneven(task, agent):
    proposed = await agent.role("proposer").complete("1+")
    if proposed.exchange.completion.versions[0] % 3 == 2:
        return {"proposer": digits(proposed.text)}
    solved = await agent.role("solver").complete(task.prompt)
    return {"proposer": digits(proposed.text), "solver": -digits(solved.text)}
"""
STEPS = 6


@pytest.fixture(params=["full", "lora"])
def run(tmp_path, request) -> Iterator[KillableRun]:
    is_lora, is_uneven = request.param == "lora", "versions" in request.node.name
    function = "uneven" if is_uneven else "against_past" if is_lora else "play"
    more = {"lora": {"rank": 4}} if is_lora else {}
    solver = {"optimizer": {"learning_rate": 1e-3}}
    solver |= {"optimizer": {"learning_rate": 2e-2}, "lags": [2]} if is_lora else {}
    policies = {"proposer": {}, "solver": solver}
    if is_uneven and is_lora:  # the first policy has no turn in some steps
        policies = {"solver": solver, "proposer": {}}
    run = KillableRun(
        tmp_path,
        steps=STEPS,
        environment={"function": f"play.py:{function}", "max_turns": 3},
        policies=policies,
        sampling={"max_new_tokens": 12},
        supervision={"max_restarts": 20, "hang_timeout_s": 60.0},
        buffer={"max_staleness": 0 if is_uneven else 1},
        **more,
    )
    (tmp_path / "play.py").write_text(ENVIRONMENT + AGAINST_PAST + UNEVEN)
    yield run
    run.close()


def check_past(run: KillableRun) -> None:
    """Each earlier version of the solver was always the same, whoever sampled with it."""
    if not (path := run.project / "past.txt").exists():
        return
    texts: dict[int, set[str]] = {}
    for line in path.read_text().splitlines():
        first, last, text = line.split(" ", 2)
        if first == last:
            texts.setdefault(int(first), set()).add(text)
    assert all(len(own) == 1 for own in texts.values()), texts
    assert max(texts) > 0


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
    check_past(run)


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
    check_past(run)


def test_killed_run_continues_the_versions_of_each_policy(run):
    run.start()
    run.until(lambda: run.step >= 4)
    run.kill()
    before = {row["step"]: row for row in read_metrics(run.path / "metrics.jsonl")}
    run.start("--resume")
    run.summary()
    rows = read_metrics(run.path / "metrics.jsonl")
    assert [row["policies/proposer/version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["policies/solver/version"] for row in rows] == [1, 2, 2, 3, 4, 4]
    for row in rows:
        # Tokens of a policy that steps have not changed since are not stale.
        assert row["staleness/max"] == 0
        for name in ("policies/proposer/loss", "policies/solver/loss", "reward/mean"):
            assert row["step"] not in before or row.get(name) == before[row["step"]].get(name)
    folder = run.path / "policies" / "solver"
    folder = folder if folder.exists() else run.path  # the first policy
    state = json.loads((folder / "checkpoints" / f"step_{STEPS}" / "run_state.json").read_text())
    assert (state["step"], state["version"]) == (STEPS, 4)
