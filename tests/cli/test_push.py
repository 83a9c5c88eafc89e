"""`millrace push` against a local hub: what is committed, the model card, and errors."""

import asyncio
import json
import tomllib
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub
from project import Command

from millrace.cli.main import main
from millrace.config import load_config
from millrace.monitoring.files.metrics import MetricsLog
from millrace.monitoring.run_dir import RunDir
from millrace.training.checkpoints.directory import write_checkpoint

WEIGHTS = bytes(range(256)) * 64


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "trainer_state.pt").write_bytes(b"optimizer")
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "rank_0.safetensors").write_bytes(b"moments")


def write_adapter(folder: Path) -> None:
    base = {"base_model_name_or_path": str(folder.absolute() / "my-base"), "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(base))
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "trainer_state.pt").write_bytes(b"optimizer")


def make_run(path: Path, *, model: str = "Qwen/Qwen3-0.6B", write=write_model) -> RunDir:
    """A run of 40 steps with checkpoints of steps 20 and 40."""
    run_dir = RunDir(path)
    scorers = [{"function": f"{path}/rewards.py:exact", "weight": 2.0}]
    sections = {"optimizer": {"learning_rate": 3e-6}, "cluster": {"ticket": str(path / "t.json")}}
    run_dir.open(load_config({"model": model, "scorers": scorers, **sections}))
    log = MetricsLog(run_dir.metrics)
    for step in range(1, 41):
        accuracy = {"eval/accuracy": 0.5} if step == 20 else {}
        log.write({"step": step, "reward/mean": step / 100, **accuracy})
    log.close()
    for step in (20, 40):
        directory = run_dir.checkpoints / f"step_{step}"
        write_checkpoint(directory, write=write, run_state={"step": step}, needed_bytes=0)
    run_dir.close()
    return run_dir


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without Xet, large files go to the hub through git-lfs, which FakeHub speaks."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # in this process


def arguments_for(run_dir: RunDir, url: str, *options: str) -> list[str]:
    return ["push", str(run_dir.path), "--repo", "me/sorter", "--endpoint", url, *options]


async def push(run_dir: RunDir, url: str, *options: str) -> int:
    return await asyncio.to_thread(main, arguments_for(run_dir, url, *options))


async def test_push_commits_the_model_and_a_card_and_keeps_an_edited_card(tmp_path, capsys):
    run_dir, hub = make_run(tmp_path / "first-run"), FakeHub()
    async with hub.serving() as url:
        arguments = arguments_for(run_dir, url, "--step=20", "--private")
        env = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        command = Command(*arguments, folder=tmp_path, env=env)
        code, output, errors = await asyncio.to_thread(command.finish)
        assert code == 0, errors
        assert TOKEN not in output + errors
        assert f"Pushed: {url}/me/sorter/commit/" in output
        assert (hub.repo["organization"], hub.repo["name"]) == ("me", "sorter")
        assert hub.repo["visibility"] == "private"
        assert hub.files.keys() == {
            "README.md",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        }
        assert hub.files["model.safetensors"] == WEIGHTS
        assert hub.messages == ["Step 20 of first-run, by millrace push"]
        card = hub.files["README.md"].decode()

        hub.files["README.md"] = b"edited by its author"
        assert await push(run_dir, url) == 0
        assert "--replace-card" in capsys.readouterr().out
        assert hub.files["README.md"] == b"edited by its author"
    head = card.split("---\n")[1]
    assert 'base_model: "Qwen/Qwen3-0.6B"' in head
    assert "license" not in head
    assert "| 19 to 20 | 0.195 | 0.5 |" in card
    assert "| 1 to 2 | 0.015 |  |" in card
    assert "0.21" not in card  # a later step
    settings = tomllib.loads(card.split("```toml\n")[1].split("```")[0])
    assert settings["optimizer"]["learning_rate"] == 3e-6
    assert settings["scorers"] == [{"function": "rewards.py:exact", "weight": 2.0}]
    assert "cluster" not in settings
    assert load_config(settings).model.path == "Qwen/Qwen3-0.6B"
    assert str(tmp_path) not in card
    assert "millrace train run.toml" in card


async def test_an_adapter_of_a_local_model_is_pushed_without_the_path_of_the_model(tmp_path):
    (tmp_path / "my-base").mkdir()
    run_dir = make_run(tmp_path / "run", model=str(tmp_path / "my-base"), write=write_adapter)
    hub = FakeHub()
    async with hub.serving() as url:
        assert await push(run_dir, url, "--license=apache-2.0") == 0
    assert hub.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(hub.files["adapter_config.json"]) == {
        "base_model_name_or_path": "my-base",
        "r": 8,
    }
    card = hub.files["README.md"].decode()
    assert 'license: "apache-2.0"' in card
    assert 'library_name: "peft"' in card
    assert "base_model:" not in card  # the hub does not know it
    assert "the local model my-base" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("token", "status", "sentence"),
    [
        ("hf_wrong", None, "does not accept the token"),
        (TOKEN, 403, "this token may not write there"),
        (TOKEN, 500, "answered with status 500"),
    ],
)
async def test_a_hub_that_refuses_is_named_with_its_reason(
    tmp_path, monkeypatch, capsys, token, status, sentence
):
    run_dir = make_run(tmp_path / "run")
    monkeypatch.setenv("HF_TOKEN", token)
    async with FakeHub(refuses=status).serving() as url:
        assert await push(run_dir, url) == 1
    errors = capsys.readouterr().err
    assert f"error: me/sorter was not pushed to {url}" in errors
    assert sentence in errors
    assert token not in errors
    assert errors.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path, capsys):
    run_dir, closed = make_run(tmp_path / "run"), "http://127.0.0.1:9"
    assert main(arguments_for(run_dir, closed)) == 1
    assert f"was not pushed to {closed}: it cannot be reached" in capsys.readouterr().err


def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, capsys):
    run_dir = make_run(tmp_path / "run")
    empty = RunDir(tmp_path / "empty")
    empty.open(load_config({"model": "m"}))
    empty.close()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))

    def error_of(path: Path, *options: str) -> str:
        arguments = ["push", str(path), "--repo", "me/sorter", *options]
        assert main(arguments) in (1, 2)
        return capsys.readouterr().err

    assert "has no config.toml" in error_of(tmp_path)
    assert "has no checkpoint yet; checkpoint.every_steps sets" in error_of(empty.path)
    assert "no checkpoint of step 30; it has 20, 40" in error_of(run_dir.path, "--step=30")
    assert "is not OWNER/NAME" in error_of(run_dir.path, "--repo", "sorter")
    assert "--license 'My own' is not" in error_of(run_dir.path, "--license", "My own")
    assert "set HF_TOKEN, or run: hf auth login" in error_of(run_dir.path)
    (run_dir.checkpoints / "step_40" / "model.safetensors").write_bytes(b"damaged")
    assert "is not pushed: it has a model.safetensors of 7 bytes" in error_of(run_dir.path)
