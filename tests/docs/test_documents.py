"""The documents say what the code does."""

import re
import runpy
import tomllib
from pathlib import Path

from millrace.config import load_config

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_what_its_script_writes():
    written = runpy.run_path(str(ROOT / "docs" / "write_configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == written


def test_every_link_between_documents_leads_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_first_python_example_of_the_readme_is_under_20_lines():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:1]
    assert len(example.splitlines()) < 20
    compile(example, "README.md", "exec")


def test_every_toml_in_the_repository_is_a_valid_config():
    found = [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "millrace").rglob("*.toml")]
    assert found
    for path in found:
        load_config(tomllib.loads(path.read_text()))
