"""Pages of docs/ match the code: no key, recipe, verifier or page is missing."""

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millrace.bench.rank_features import FEATURES, MESHES
from millrace.config import load_config
from millrace.controller.orders import ORDERS
from millrace.core.records import Task
from millrace.environments import branching
from millrace.inference.backend import BACKENDS
from millrace.monitoring.callbacks import check_callback
from millrace.scoring import advantages
from millrace.scoring.functions.function_scorer import Function
from millrace.scoring.pool import SCORER_TYPES, check_scorers, resolve_scorer
from millrace.scoring.reward_models.steps import STEPS
from millrace.scoring.scorer_type import CallSettings, ScorerType
from millrace.scoring.services.endpoint import Http
from millrace.scoring.services.judge import Judge
from millrace.scoring.shaping import FILTERS, PENALTIES, SELECTIONS
from millrace.scoring.verifiers import VERIFIERS
from millrace.tasks.loading import GENERATORS
from millrace.training.losses.recipes import ADVANTAGES, RECIPES

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    """The text of a page in any folder of docs/."""
    (path,) = (ROOT / "docs").rglob(f"{page}.md")
    return path.read_text()


def examples(page: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.S)


@pytest.mark.parametrize(
    ("page", "script"), [("configuration", "write_configuration.py"), ("api", "write_api.py")]
)
def test_generated_page_is_up_to_date(page, script):
    written = runpy.run_path(str(ROOT / "tools" / script))["page"]()
    assert text_of(page) == written, f"run: python tools/{script}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_configuration_page_describes_every_option_of_an_engine_backend(backend):
    sections = re.split(r"^##+ ", text_of("configuration"), flags=re.M)
    of_options = [one for one in sections if one.startswith("Options of ")]
    (section,) = [one for one in of_options if f'"{backend}"' in one.splitlines()[0]]
    rows = re.findall(r"^\| `(\w+)` \| [^|].* \| .* \| ([A-Z].*\.) \|$", section, re.M)
    fields = dataclasses.fields(BACKENDS[backend])
    assert [key for key, _ in rows] == [field.name for field in fields]


# How a description begins that needs the name of its setting, or the row above, to be clear.
NO_NOUN_PHRASE = re.compile(r"(Whether|What|How|If|Or|Of|Use|Enable|Subtract|Scale the) ")


def test_every_description_of_the_configuration_page_begins_with_a_noun_phrase():
    for line in text_of("configuration").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:1] == ["key"]:
            column = cells.index("")  # the column of descriptions has no name
        elif line.startswith("| `"):
            text = cells[column]
            assert re.match(r"[A-Z].*\.$", text), line
            assert not NO_NOUN_PHRASE.match(text), line


def scorer_types(*names: str) -> dict[str, type]:
    return {name: SCORER_TYPES[name] for name in names}


@pytest.mark.parametrize(
    ("page", "plugins"),
    [
        ("shape-training-data", [FILTERS, PENALTIES, SELECTIONS]),
        ("reward-models", [scorer_types("reward_model", "process_reward_model"), STEPS]),
        ("teachers", [scorer_types("teacher", "self_teacher", "reference")]),
        ("environments", [branching.RECIPES]),
        ("losses", [advantages.ADVANTAGES]),
        ("tasks", [GENERATORS]),
        ("buffer", [ORDERS]),
    ],
)
def test_page_names_every_key_of_its_plug_ins(page, plugins):
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text_of(page), re.S))
    for name, plugin in ((name, one) for table in plugins for name, one in table.items()):
        for field in dataclasses.fields(plugin):
            assert re.search(rf"\b{field.name}\b", code), f"{page}.md: {name}.{field.name}"


def test_navigation_lists_every_page_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    site = runpy.run_path(str(ROOT / "tools" / "build_docs.py"))
    listed = pages(site["navigation"]())
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in site["PLACES"])]
    assert sorted(listed) == sorted({str(site["place_of"](page)) for page in sources})


def test_types_of_keyword_arguments_are_up_to_date():
    written = runpy.run_path(str(ROOT / "tools" / "write_keywords.py"))["stub"]()
    stub = ROOT / "src" / "millrace" / "config" / "keywords.pyi"
    assert stub.read_text() == written, "run: python tools/write_keywords.py"


def test_callbacks_of_the_python_page_have_valid_hooks():
    names: dict[str, Any] = {}
    for code in examples("python-api", "python"):
        compile(code, "python-api.md", "exec")
        if "class " in code:
            exec(code, names)
    check_callback(names["Plateau"]())


def test_first_example_of_readme_is_under_20_lines():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:1]
    assert len(example.splitlines()) < 20
    compile(example, "README.md", "exec")


def test_every_toml_file_is_a_valid_config():
    found = [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "src" / "millrace").rglob("*.toml")]
    assert found
    for path in found:
        work = {"model": "m"} if path.parent.name == "presets" else {}  # a preset names none
        assert load_config({**work, **tomllib.loads(path.read_text())}).model.path, path


def test_losses_page_lists_every_recipe_with_its_settings():
    page = text_of("losses").split("## Recipes")[1]
    for name, recipe in RECIPES.items():
        (row,) = re.findall(rf"^\| `{name}`.*$", page, re.M)
        if name == "a3po":
            continue  # described by its difference from another recipe
        settings, advantages = row.split("|")[2:4]
        for key, value in recipe.items():
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
            shown = {"0.0003": "3e-4", "0.0004": "4e-4"}.get(shown, shown)
            assert f"{key} {shown}" in settings, (name, key)
        assert advantages.strip().startswith(ADVANTAGES.get(name, {"type": "group"})["type"])


def test_ranks_page_has_a_row_for_every_feature_and_a_column_for_every_mesh():
    table = re.search(r"^\|  \| one rank .*\n(?:\|.*\n)+", text_of("ranks"), re.M)
    assert table is not None, "the table that millrace bench ranks prints"
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()
    ]
    assert header[1:] == [*MESHES]
    assert [row[0] for row in rows] == [*FEATURES]
    for name, *cells in rows:
        has_number = [bool(re.fullmatch(r"0|\d\.\de-\d\d", cell)) for cell in cells]
        assert has_number == [FEATURES[name].fits(sizes) for sizes in MESHES.values()], name


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


def test_scorer_of_scorers_page_has_the_protocol_of_scorer_types():
    _, scorer, _test = examples("scorers", "python")
    names: dict[str, Any] = {"__name__": "scorers"}
    exec(scorer, names)
    assert isinstance(names["Brevity"](), ScorerType)
