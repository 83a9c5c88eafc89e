"""Pages of docs/ match the code: settings are valid, examples run, and no key is missing."""

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millrace.config import load_config
from millrace.core.records import Task
from millrace.environments.function_environment import check_function
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.registry import check_scorers, resolve_scorer
from millrace.scoring.scorer_type import CallSettings, ScorerType
from millrace.scoring.services.http_scorer import Http
from millrace.scoring.services.judge import Judge
from millrace.scoring.shaping.shaping import build_shaping
from millrace.scoring.verifiers import VERIFIERS
from millrace.training.losses.recipes import ADVANTAGES, RECIPES

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    """The text of a page in any folder of docs/."""
    (path,) = (ROOT / "docs").rglob(f"{page}.md")
    return path.read_text()


def examples(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.S)


def test_configuration_page_is_up_to_date():
    written = runpy.run_path(str(ROOT / "tools" / "write_configuration.py"))["page"]()
    assert text_of("configuration") == written


def test_first_example_of_readme_is_under_20_lines():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:1]
    assert len(example.splitlines()) < 20
    compile(example, "README.md", "exec")


def test_every_toml_file_is_a_valid_config():
    found = [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "src" / "millrace").rglob("*.toml")]
    assert found
    for path in found:
        assert load_config(tomllib.loads(path.read_text())).model.path, path


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("losses", "test_tokens_at_the_ceiling_have_no_gradient"),
        ("shape-training-data", "test_unsolved_groups_are_dropped"),
        ("buffer", "test_short_groups_go_first"),
    ],
)
def test_plugin_of_a_page_passes_its_test(page, name):
    plug_in, test = examples(page, "python")
    assert "assert " in test
    names: dict[str, Any] = {"__name__": page}
    exec(plug_in + test, names)
    names[name]()


def test_settings_of_shaping_page_can_be_built():
    tomls = examples("shape-training-data", "toml")
    assert len(tomls) == 5
    for toml in tomls:
        config = load_config({"model": "m", **tomllib.loads(toml)})
        assert config != load_config({"model": "m"})
        build_shaping(
            penalties=config.scoring.penalty,
            filters=config.rollout.filter,
            selection=config.rollout.selection,
            keep=config.rollout.group_size,
            seed=0,
            scorers=(),
        )


def test_settings_of_tasks_page_are_valid():
    for toml in examples("tasks", "toml"):
        assert load_config({"model": "m", **tomllib.loads(toml)}).tasks.is_named


def test_environments_of_adapters_page_can_be_built():
    pytest.importorskip("gymnasium")
    for code in examples("other-environments", "python"):
        if "import verifiers" in code:
            continue  # conflicts with the pins of the tests; see make test-adapters
        names: dict[str, Any] = {}
        exec(code, names)
        check_function(names["play"])


def test_settings_of_buffer_page_are_valid():
    (toml,) = examples("buffer", "toml")
    assert load_config({"model": "m", **tomllib.loads(toml)}) != load_config({"model": "m"})


def test_losses_page_lists_every_recipe_with_its_settings():
    page = text_of("losses").split("## Recipes")[1]
    for name, recipe in RECIPES.items():
        (row,) = re.findall(rf"^\| `{name}`.*$", page, re.M)
        if name == "a3po":
            continue  # described by its difference from another recipe
        settings, advantages = row.split("|")[2:4]
        for key, value in recipe.items():
            shown = f"{value:g}" if isinstance(value, float) else value
            shown = {"0.0003": "3e-4", "0.0004": "4e-4"}.get(shown, shown)
            assert f"{key} {shown}" in settings, (name, key)
        assert advantages.strip().startswith(ADVANTAGES.get(name, {"type": "group"})["type"])


def test_verifiers_page_lists_every_key_with_its_default():
    page = text_of("verifiers")
    for name, verifier in VERIFIERS.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", page, re.M)
        for field in dataclasses.fields(verifier):
            key = re.search(rf"`{field.name}(?: = ([^`]*))?`", row)
            assert key is not None, (name, field.name)
            if key[1] is not None:
                assert tomllib.loads(f"x = {key[1]}")["x"] == field.default, (name, field.name)


def test_verifiers_of_verifiers_page_can_be_built():
    (toml,) = examples("verifiers", "toml")
    config = load_config({"model": "m", **tomllib.loads(toml)})
    built = [resolve_scorer(row, section="scorer").type.function for row in config.scorers]
    assert built
    assert all(isinstance(verifier, tuple(VERIFIERS.values())) for verifier in built)


def test_settings_of_reward_models_page_are_valid():
    blocks = examples("reward-models", "toml")
    assert blocks
    for block in blocks:
        config = load_config({"model": "m", **tomllib.loads(block)})
        for row in config.scorers:
            assert row.function or resolve_scorer(row, section="scorer").name == row.type


def test_settings_of_scorers_page_are_valid(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "k")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def format(completions): ...")
    (example,) = examples("scorers", "toml")
    config = load_config({"model": "m", **tomllib.loads(example)})
    specs = [resolve_scorer(row, section="scorer") for row in config.scorers]
    check_scorers(specs, [Task(prompt="p", columns={"answer": "a"})])
    assert [spec.name for spec in specs] == ["format", "judge", "style"]


def test_scorers_page_lists_every_key_of_services_with_its_default():
    page = text_of("scorers")
    for name, kind in (("http", Http), ("judge", Judge)):
        section = page.split(f'## `type = "{name}"`')[1].split("## ")[0]
        for field in dataclasses.fields(kind):
            (default,) = re.findall(rf"^\| `{field.name}` \|([^|]*)\|", section, re.M)
            if field.default not in (dataclasses.MISSING, None):
                assert tomllib.loads(f"x = {default.strip(' `')}")["x"] == field.default


def test_scorers_page_lists_call_settings_of_services_and_functions():
    section = text_of("scorers").split("## How scorers are called")[1]
    services = CallSettings()
    functions = Function(function=lambda completions: []).call_settings(num_workers=2)
    for name in ("batch", "timeout_s", "retries"):
        (row,) = re.findall(rf"^\| `{name}` \| (\S+) \| (\S+) \|", section, re.M)
        assert tuple(map(float, row)) == (getattr(services, name), getattr(functions, name))


def test_scorer_of_scorers_page_passes_its_test():
    _, scorer, test = examples("scorers", "python")
    names: dict[str, Any] = {"__name__": "scorers"}
    exec(scorer + test, names)
    names["test_short_completions_score_1"]()
    assert isinstance(names["Brevity"](), ScorerType)
