"""A run in which a second model, with its own vocabulary, judges the policy's replies."""

import asyncio
import json
import re
from pathlib import Path

import psutil
import pytest
from tiny_model import ALPHABET, make_tiny_model

import millrace as mr
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.environments.function_environment import rerun
from millrace.environments.replay.recordings import read_recordings
from millrace.models.directory import load_tokenizer
from millrace.run.prepare import PreparedRun, prepare

JUDGE_ALPHABET = "klmnopqrstuvwxyz"  # disjoint from the policy's


def letters(reply: mr.Reply) -> set[str]:
    return set(reply.text.replace("<pad>", ""))


async def judged(task: mr.Task, agent: mr.Agent) -> float:
    answer = await agent.complete(task.prompt)
    verdict = await agent.role("judge", model="judge").complete("k" * (1 + len(answer.text)))
    assert letters(verdict) <= set(JUDGE_ALPHABET), verdict.text
    return float("m" in verdict.text)


def settings_of(folder: Path) -> dict:
    judge = make_tiny_model(folder / "judge", seed=1, alphabet=JUDGE_ALPHABET)
    return {
        "model": str(make_tiny_model(folder / "model")),
        "run_dir": str(folder / "run"),
        "tasks": [{"prompt": f"{n}+1="} for n in range(8)],
        "environment": {"function": judged, "models": {"judge": {"path": str(judge)}}},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"group_size": 4},
        "trainer": {"steps": 2, "groups_per_step": 2},
        "scoring": {"workers": 1},
        "monitoring": {"progress": "off", "record_episodes": 2},
    }


@pytest.mark.slow
def test_role_can_be_another_model_in_a_run_and_in_its_replay(tmp_path):
    settings = settings_of(tmp_path)
    result = mr.train(**settings)
    assert result.episodes == 2 * 2 * 4
    assert (result.run_dir / "logs" / "model-judge-0.log").exists()
    lines = list(read_recordings(result.run_dir / "episodes" / "step_2.jsonl"))
    assert lines
    tokenizers = {"judge": load_tokenizer(str(tmp_path / "judge"))}
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    for line in lines:
        assert [(agent.name, agent.model) for agent in line.episode.agents] == [
            ("", None),
            ("judge", "judge"),
        ]
        again = asyncio.run(rerun(line.episode, judged, tokenizer=tokenizer, tokenizers=tokenizers))
        assert again.reward == line.episode.reward
        (rollout,) = again.rollouts  # the judge is not trained
        assert set(tokenizer.decode(rollout.tokens, skip_special_tokens=True)) <= set(ALPHABET)


def worker(name: str) -> psutil.Process:
    """A worker of this process, by name."""
    started = psutil.Process().children(recursive=True)
    return next(process for process in started if name in process.cmdline())


@pytest.mark.slow
def test_killed_process_of_another_model_is_replaced(tmp_path):
    marker = tmp_path / "killed"

    async def killing(task: mr.Task, agent: mr.Agent) -> float:
        judge = agent.role("judge", model="judge")
        before = await judge.complete("k")
        if not marker.exists():
            marker.touch()
            worker("model-judge-0").kill()
        after = await judge.complete("k", temperature=0.5)
        assert letters(before) | letters(after) <= set(JUDGE_ALPHABET)
        answer = await agent.complete(task.prompt)
        return float("1" in answer.text)

    settings = settings_of(tmp_path)
    settings["environment"]["function"] = killing
    result = mr.train(**settings)
    assert marker.exists()
    assert result.episodes == 2 * 2 * 4
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["restarts"] == {"model-judge-0": 1}


def prepared(folder: Path, engine: dict, **further) -> PreparedRun:
    """A run with these engine settings of the judge, as it is before its start."""
    settings = settings_of(folder) | further
    tasks, environment = settings.pop("tasks"), settings["environment"].pop("function")
    settings["environment"]["models"]["judge"] |= engine
    return prepare(load_config(settings), tasks=tasks, environment=environment)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"type": "embeded"}, "judge.type' = 'embeded' is not known; did you mean 'embedded'?"),
        ({"options": {"compil": True}}, "setting 'environment.models.judge.options.compil' of"),
        ({"tp": 2}, "judge.tp' = 2: the embedded engine computes on one GPU; set it to 1, or envi"),
        (
            {"type": "vllm", "options": {"attach": ["http://a", "http://b"]}},
            "judge.options.attach has 2 servers, and the run has 1 engines of [environment.models",
        ),
        (
            {"type": "vllm", "options": {"attach": ["http://a"], "api_key": "env:NO_SUCH_KEY"}},
            "environment.models.judge.options.api_key needs the environment variable 'NO_SUCH_KEY'",
        ),
        (
            {"type": "minimal_backend:MinimalBackend"},
            "journal.partial_every_s = 5 needs resuming partial completions, which"
            " environment.models.judge.type = 'minimal_backend:MinimalBackend' does not offer; set",
        ),
    ],
)
def test_invalid_engine_of_a_model_is_refused_with_its_section(tmp_path, engine, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepared(tmp_path, engine)


def test_model_may_have_a_minimal_engine_if_the_journal_records_no_partial_completions(tmp_path):
    run = prepared(
        tmp_path,
        {"type": "minimal_backend:MinimalBackend"},
        journal={"partial_every_s": 0},
    )
    assert run.models.keys() == {"judge"}


def test_invalid_models_are_reported_before_the_run(tmp_path):
    settings = settings_of(tmp_path)
    judge = settings["environment"]["models"]["judge"]
    settings["environment"]["models"] = {"judge": {**judge, "max_context": 4096}}
    with pytest.raises(
        ConfigError, match=r"environment\.models\.judge\.max_context = 4096 exceeds the 128"
    ):
        mr.train(**settings)
    settings["environment"]["models"] = {"judge": {"path": str(tmp_path / "absent" / "model")}}
    with pytest.raises(ConfigError, match=r"does not exist; check environment\.models\.judge\.pat"):
        mr.train(**settings)
    settings["environment"], settings["monitoring"] = {"models": {"judge": judge}}, {}
    with pytest.raises(ConfigError, match=r"\(judge\) are for roles of an environment\.function"):
        mr.train(**settings, scorers=[lambda completions, **_: [0.0 for _ in completions]])
    assert not (tmp_path / "run").exists()
