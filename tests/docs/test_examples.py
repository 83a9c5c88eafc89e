"""Every example in the documents works: settings are valid, and code runs.

The Python blocks of a page are one program. It runs in an empty folder, and functions in it whose
names begin with test_ are called. The lists below name the pages with code that is not run here.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millrace.config import load_config
from millrace.environments.function_environment import check_function
from millrace.scoring.pool import resolve_scorer
from millrace.scoring.shaping import build_shaping

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/**/*.md")])
# Code that trains a model runs in a slow test, with a tiny model.
TRAINS = ("README", "environments", "first-agent", "from-trl")
# Code of these pages is only compiled.
COMPILED = {
    "external-environments": "tests/e2e/test_environments_elsewhere.py runs it beside a run",
    "from-verifiers": "verifiers conflicts with the pins; tests/environments/test_verifiers_env.py",
    "journal": "tests/docs/test_journal_format.py runs it on a real journal",
    "lora": "loads a checkpoint; tests/e2e/test_lora_run.py does so, too",
    "python-api": "trains from a file; tests/e2e/test_python_api.py does the same",
    "sft": "trains; tests/e2e/test_sft_run.py does the same",
    "serve": "needs a server; tests/serving/ has them",
    "training-api": "needs a server; tests/serving/tinker/test_tinker_client.py runs it",
}


OPTIONAL = ("reasoning_gym",)  # scorers of packages that the tests do not install


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.S | re.M)


def pages_with(language: str) -> list[Path]:
    return [document for document in DOCUMENTS if blocks(document, language)]


def program_of(document: Path) -> str:
    return "\n\n".join(blocks(document, "python"))


@pytest.mark.parametrize("document", pages_with("toml"), ids=lambda path: path.stem)
def test_settings_are_valid(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "k")
    Path("rewards.py").write_text("def format(completions): ...\ndef exact(completions): ...\n")
    for block in blocks(document, "toml"):
        config = load_config({"model": "m", **tomllib.loads(block)})
        for row in config.scorers:
            if row.type not in OPTIONAL:
                assert resolve_scorer(row, section="scorers").type
        build_shaping(
            penalties=config.scoring.penalty,
            filters=config.rollout.filter,
            selection=config.rollout.selection,
            keep=config.rollout.group_size,
            seed=0,
            scorers=(),
        )


@pytest.mark.parametrize("document", pages_with("python"), ids=lambda path: path.stem)
def test_code_runs(document, tmp_path, monkeypatch):
    program = compile(program_of(document), document.name, "exec")
    if document.stem in (*TRAINS, *COMPILED):
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": document.stem}
    exec(program, names)
    for name in [name for name in names if name.startswith("test_")]:
        names[name]()
    if "play" in names:
        check_function(names["play"])


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    from talking_model import TOKENIZER, make_model

    folder = tmp_path_factory.mktemp("chat_model")
    make_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("warm_fork_server")
@pytest.mark.parametrize("document", TRAINS)
def test_code_trains(document, chat_model, tmp_path, monkeypatch):
    (path,) = [path for path in DOCUMENTS if path.stem == document and "examples" not in path.parts]
    monkeypatch.chdir(tmp_path)
    short = {
        r'model="[^"]*"': f'model="{chat_model}"',
        r"trainer=\{.*?\},\n": "",
        r"mr\.train\(": (
            'mr.train(trainer={"steps": 1, "groups_per_step": 1}, rollout={"group_size": 2},'
            ' sampling={"max_new_tokens": 8}, monitoring={"progress": "off"}, '
        ),
    }
    program = program_of(path)
    for pattern, replacement in short.items():
        program = re.sub(pattern, replacement.replace("\\", "\\\\"), program)
    exec(compile(program, path.name, "exec"), {"__name__": document})
    assert list(tmp_path.glob("runs/*/checkpoints/step_1/config.json"))
