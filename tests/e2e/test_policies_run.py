"""Runs that train several policies, each from its own tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from metrics_page import unknown_metrics
from safetensors.numpy import load_file
from tiny_model import make_tiny_model

import millrace as mr
from millrace.core.errors import ConfigError
from millrace.monitoring.files.metrics import read_metrics
from millrace.monitoring.files.samples import read_samples
from millrace.monitoring.run_dir import RunDir


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def are_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


async def only_the_solver_learns(task: mr.Task, agent: mr.Agent) -> dict[str, float]:
    await agent.role("proposer").complete("1+")
    solved = await agent.role("solver").complete(str(task.prompt))
    return {"proposer": 0.5, "solver": float(len(solved.text))}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    solver: dict[str, Any] = {"model": str(make_tiny_model(folder / "solver", seed=1))}
    solver["optimizer"] = {"learning_rate": 1e-3}
    return {
        "model": str(make_tiny_model(folder / "model")),
        "run_dir": str(folder / "run"),
        "tasks": [{"prompt": f"{n}+1="} for n in range(8)],
        "environment": {"function": only_the_solver_learns, "max_turns": 2},
        "policies": {"proposer": {}, "solver": solver},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 3, "groups_per_step": 2},
        "optimizer": {"learning_rate": 1e-4},
        "scoring": {"workers": 1},
        "cluster": {"threads": 1},
        "monitoring": {"progress": "off"},
        **more,
    }


@pytest.mark.slow
def test_each_policy_learns_only_from_its_own_rollouts(tmp_path):
    # All episodes give the proposer the same reward, so its own rollouts change nothing.
    result = mr.train(**settings_of(tmp_path))
    assert are_equal(weights(tmp_path / "model"), weights(result.checkpoint))
    solver = result.run_dir / "policies" / "solver" / "checkpoints" / "step_3"
    before, after = weights(tmp_path / "solver"), weights(solver)
    assert not are_equal(before, after)
    assert all(np.abs(before[name] - after[name]).max() < 0.01 for name in before)
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert unknown_metrics(rows[0]) == []
    for row in rows:
        assert row["policies/proposer/learning_rate"] == row["learning_rate"] == 1e-4
        assert row["policies/solver/learning_rate"] == 1e-3
        assert row["policies/proposer/loss"] == row["loss"] == 0.0
        assert row["policies/solver/grad_norm"] > 0
    # The engines of each policy sampled with its weights: both agree with their trainers.
    assert abs(rows[0]["policies/proposer/mismatch/logprob"]) < 1e-5
    assert abs(rows[0]["policies/solver/mismatch/logprob"]) < 1e-5
    for step in (1, 2, 3):
        for sample in read_samples(RunDir(result.run_dir), step):
            for rollout in sample.rollouts:
                assert rollout.policy == rollout.agent
    logs = {path.name for path in (result.run_dir / "logs").glob("*.log")}
    assert {"engine-0.log", "model-solver-0.log", "trainer.log", "trainer-solver.log"} <= logs


@pytest.mark.slow
def test_policy_without_a_turn_in_a_step_keeps_its_weights(tmp_path):
    async def proposer_alone(task: mr.Task, agent: mr.Agent) -> dict[str, float]:
        reply = await agent.role("proposer").complete("1+")
        return {"proposer": float(len(reply.text))}

    environment = {"function": proposer_alone, "max_turns": 2}
    result = mr.train(**settings_of(tmp_path, environment=environment))
    solver = result.run_dir / "policies" / "solver" / "checkpoints" / "step_3"
    state = json.loads((solver / "run_state.json").read_text())
    assert (state["step"], state["version"]) == (3, 0)
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["policies/solver/version"] for row in rows] == [0, 0, 0]
    assert [row["policies/proposer/version"] for row in rows] == [1, 2, 3]
    assert are_equal(weights(tmp_path / "solver"), weights(solver))
    assert not are_equal(weights(tmp_path / "model"), weights(result.checkpoint))


@pytest.mark.slow
def test_role_that_is_no_policy_is_refused_with_the_nearest_name(tmp_path):
    async def misspelled(task: mr.Task, agent: mr.Agent) -> float:
        await agent.role("slover").complete(str(task.prompt))
        return 1.0

    environment = {"function": misspelled, "max_turns": 2}
    with pytest.raises(mr.MillraceError, match=r"'slover' is none of.*did you mean 'solver'"):
        mr.train(**settings_of(tmp_path, environment=environment))


def adapter_weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


def lora_settings(folder: Path, **more: Any) -> dict[str, Any]:
    policies = {"proposer": {}, "solver": {"optimizer": {"learning_rate": 1e-2}}}
    return settings_of(folder, policies=policies, lora={"rank": 4}, **more)


@pytest.mark.slow
def test_adapters_of_policies_share_one_trainer_and_one_engine(tmp_path):
    result = mr.train(**lora_settings(tmp_path, buffer={"max_staleness": 0}))
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert unknown_metrics(rows[0]) == []
    for row in rows:
        # All episodes give the proposer the same reward, so its own rollouts change nothing.
        assert row["policies/proposer/loss"] == row["loss"] == 0.0
        assert row["policies/solver/learning_rate"] == 1e-2
        assert row["policies/solver/grad_norm"] > 0
        # Each role was sampled with the newest adapter of its policy: the trainer agrees.
        assert abs(row["policies/proposer/mismatch/logprob"]) < 1e-5
        assert abs(row["policies/solver/mismatch/logprob"]) < 1e-5
    logs = {path.name for path in (result.run_dir / "logs").glob("*.log")}
    assert {name for name in logs if name.startswith(("engine", "trainer", "model"))} == {
        "engine-0.log",
        "trainer.log",
    }
    solver = result.run_dir / "policies" / "solver" / "checkpoints" / "step_3"
    ours, theirs = adapter_weights(result.checkpoint), adapter_weights(solver)
    assert ours.keys() == theirs.keys()
    b = [name for name in ours if ".lora_B." in name]
    assert all(not ours[name].any() for name in b)
    assert all(theirs[name].any() for name in b)
    for step in (1, 2, 3):
        for sample in read_samples(RunDir(result.run_dir), step):
            for rollout in sample.rollouts:
                assert rollout.policy == rollout.agent
                assert set(rollout.versions) == {-1, step - 1}


@pytest.mark.slow
def test_engine_of_several_adapters_restarts_after_the_first_checkpoint_is_gone(tmp_path):
    settings = lora_settings(tmp_path, checkpoint={"every_steps": 1, "keep": 1})
    first = mr.train(**settings).checkpoint
    killed: list[int] = []

    class KillEngine(mr.Callback):
        def on_step(self, metrics: Mapping[str, Any]) -> None:
            if not killed and not first.exists():
                workers = psutil.Process().children(recursive=True)
                (engine,) = (worker for worker in workers if "engine-0" in worker.cmdline())
                engine.kill()
                killed.append(engine.pid)

    settings["trainer"]["steps"] = 8
    result = mr.train(**settings, resume=True, callbacks=[KillEngine()])
    assert killed
    assert result.steps == 8


@pytest.mark.slow
def test_role_with_a_lag_is_played_by_an_earlier_version_of_a_policy(tmp_path):
    texts: dict[tuple[str, int], set[str]] = {}  # greedy, by policy and version
    distances: dict[tuple[str, int], set[int]] = {}  # by policy and lag

    async def greedy(agent: mr.Agent, policy: str, lag: int) -> int | None:
        """The version that sampled; None if there were several."""
        role = agent.role(f"{policy} {lag}", model=policy, lag=lag)
        reply = await role.complete("1+", temperature=0.0)
        versions = {int(version) for version in reply.exchange.completion.versions}
        if len(versions) > 1:
            return None
        version = versions.pop()
        texts.setdefault((policy, version), set()).add(reply.text)
        return version

    async def play(task: mr.Task, agent: mr.Agent) -> dict[str, float]:
        for policy, lag in (("proposer", 1), ("solver", 2), ("solver", 3)):
            # Its distance to the newest is not less, if that is sampled last.
            past, newest = await greedy(agent, policy, lag), await greedy(agent, policy, 0)
            if past and newest:
                distances.setdefault((policy, lag), set()).add(newest - past)
        with pytest.raises(mr.MillraceError, match="they keep model='proposer', lag=1, model='sol"):
            agent.role("other", model="proposer", lag=2)
        proposed = await agent.role("proposer").complete("1+")
        solved = await agent.role("solver").complete(str(task.prompt))
        return {"proposer": float(len(proposed.text)), "solver": -float(len(solved.text))}

    policies = {"proposer": {"lags": [1]}, "solver": {"lags": [2, 3]}}
    settings = lora_settings(tmp_path, buffer={"max_staleness": 0}, trainer={"steps": 7})
    settings |= {"policies": policies, "optimizer": {"learning_rate": 3e-2}}
    settings["environment"] = {"function": play, "max_turns": 8}
    result = mr.train(**settings)
    # A version says the same whether it is the newest or an earlier one, and versions differ.
    assert all(len(own) == 1 for own in texts.values())
    for policy in ("proposer", "solver"):
        assert len({text for (own, _), (text,) in texts.items() if own == policy}) > 1
    for (_, lag), found in distances.items():
        assert lag in found
        assert min(found) >= lag
    assert set(distances) == {("proposer", 1), ("solver", 2), ("solver", 3)}
    saved = result.run_dir / "policies" / "solver" / "checkpoints" / "step_7"
    assert {path.name for path in (saved / "versions").iterdir()} == {"4", "5", "6", "7"}
    assert are_equal(adapter_weights(saved), adapter_weights(saved / "versions" / "7"))
    assert not are_equal(adapter_weights(saved), adapter_weights(saved / "versions" / "4"))


def test_unsupported_settings_are_refused_before_the_run(tmp_path):
    for more, message in [
        ({"evaluate": {"engines": 1}, "eval_tasks": [{"prompt": "1"}]}, "evaluate.engines = 1"),
        ({"weights": {"interrupt": "barrier"}, "buffer": {"max_staleness": 0}}, "'barrier'"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks = 2"),
        ({"critic": {}}, r"\[critic\]"),
        ({"environment": {}, "scorers": length}, "roles of an environment.function"),
        ({"policies": {"a": {"optimizer": {"learning_rat": 1.0}}}}, "did you mean 'learning_rate'"),
        ({"policies": {"a": {"optimizer": {"type": "x.y:Z"}}}}, "policies.a.optimizer.type = 'x.y"),
        ({"policies": {"a": {"los": "grpo"}}}, "did you mean 'loss'"),
        ({"policies": {"a": {}, "b": {"model": str(tmp_path / "absent/b")}}}, "does not exist"),
        ({"policies": {"a": {"lags": [2]}}}, r"policies.a.lags = \[2\], but only adapters"),
        ({"policies": {"a": {"lags": [0]}}}, "lags"),
    ]:
        with pytest.raises(ConfigError, match=message):
            mr.train(**settings_of(tmp_path, **more))
    for more, message in [
        ({"policies": {"a": {}, "b": {"model": "other"}}}, "policies.b.model = 'other', but with"),
        ({"lora": {"dora": True}}, "lora.dora = true"),
        ({"lora": {"apply": "merged"}}, "lora.apply = 'merged'"),
        ({"optimizer": {"type": "muon"}}, "optimizer.type = 'muon'"),
        ({"policies": {"a": {}, "b": {}}, "engine": {"adapters": {"b": "x"}}}, "have one name"),
        ({"policies": {"a": {"lags": [2]}, "a@2": {}}}, "'a@2' is the name of an earlier version"),
        ({"policies": {"a": {"lags": [2]}}, "lora": {"dora": True}}, "lora.dora = true"),
    ]:
        with pytest.raises(ConfigError, match=message):
            mr.train(**{**lora_settings(tmp_path), **more})
    assert not (tmp_path / "run").exists()
