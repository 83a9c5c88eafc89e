"""`millrace replay` on a file, with an environment, an edit and a reward function."""

import asyncio
import json
import textwrap

import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of
from transformers import Qwen3Config

from millrace.cli.main import main
from millrace.core.plugins import load_reference
from millrace.core.records import Task
from millrace.environments.replay.recordings import Line, read_recordings, write_recordings
from millrace.environments.replay.schema import Recording, decode
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread

ENVIRONMENT = """
    def lookup(key: str) -> str:
        '''The value of a key.'''
        return {"a": "12"}[key]

    async def look(task, agent):
        messages = await agent.run([{"role": "user", "content": task.prompt}], tools=[lookup])
        return float("12" in messages[-2]["content"])

    def short(completions, **columns):
        return [-float("twelve" in completion) for completion in completions]
"""


def caller(prompt: str) -> str:
    if "<tool_response>" not in prompt:
        return '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
    return "twelve"


@pytest.fixture
def recorded(tmp_path):
    """A file with two episodes of a group, and the environment that played them."""
    environment = tmp_path / "looking.py"
    environment.write_text(textwrap.dedent(ENVIRONMENT))
    TOKENIZERS["chatml"].save_pretrained(tmp_path / "model")
    Qwen3Config().save_pretrained(tmp_path / "model")

    async def play():
        with LoopThread("environments") as thread:
            function = load_reference(f"{environment}:look")
            player = player_of(function, ChatEngine(caller), thread=thread, records=True)
            task = Task(prompt="What is a?", columns={"value": "12"})
            return await player.play_for_training(task, attempt=Attempt(4), group_size=2)

    group = asyncio.run(play())
    lines = [
        Line(
            group=4,
            score=1.0,
            model=str(tmp_path / "model"),
            episode=decode(episode.recording or b"", Recording),
        )
        for episode in group.episodes
    ]
    write_recordings(tmp_path / "step_1.jsonl", lines)
    return tmp_path / "step_1.jsonl", environment


def test_replay_reruns_and_rescores_recorded_episodes(recorded, capsys):
    path, environment = recorded
    arguments = ["--environment", f"{environment}:look", "--score", f"{environment}:short"]
    assert main(["replay", str(path), *arguments]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["episode"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["turns"], row["reward"], row["ending"]) == (2, 1.0, "done")
        assert row["parts"] == {"environment": 1.0, "short": -1.0}
        assert row["score"] == 0.0


def test_replay_marks_turns_after_an_edit_as_not_recorded(recorded, tmp_path, capsys):
    path, environment = recorded
    out = tmp_path / "edited.jsonl"
    edit = ["--tool-result", "0=none", "--out", str(out)]
    assert main(["replay", str(path), "--environment", f"{environment}:look", *edit]) == 0
    for line in read_recordings(out):
        assert line.episode.reward == 0.0
        assert [turn.is_recorded for turn in line.episode.turns] == [True, False]
    assert json.loads(capsys.readouterr().out.splitlines()[0])["turns_not_recorded"] == 1
    assert main(["replay", str(path), "--tool-result", "0=none"]) == 2
    assert "name it with --environment" in capsys.readouterr().err
    assert main(["replay", str(path), "--reward", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["reward"] == 0.5


def test_scorer_that_needs_a_run_is_refused_in_one_sentence(recorded, tmp_path, capsys):
    path, _environment = recorded
    config = tmp_path / "run.toml"
    config.write_text('model = "m"\nscorers = [{ type = "reference" }]\n')
    assert main(["replay", str(path), "--config", str(config)]) == 2
    assert "error: Scorer 'reference' reads the tokens of a training run" in capsys.readouterr().err
