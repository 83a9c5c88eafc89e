"""Documents, comments and the Makefile name only files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("docs/**/*.md")])
PYTHON = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
BASES = (ROOT, ROOT / "src" / "millrace")
FOLDERS = {path.name for base in BASES for path in base.iterdir() if path.is_dir()}
PATH = re.compile(r"(?<![\w./-])([a-z_]+/[\w/.-]*\.(?:py|md|toml|png))\b")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def missing_files(text: str) -> list[str]:
    """Paths in the text that start with a folder of the repository or a package, but do not exist.

    Paths of a package are relative to src/millrace/, as in core/records.py.
    """
    return [
        path
        for path in PATH.findall(text)
        if path.split("/")[0] in FOLDERS and not any((base / path).exists() for base in BASES)
    ]


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_resolves(document):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            linked = document.parent / target if target else document
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_file_that_a_document_names_exists(document):
    assert missing_files(document.read_text()) == []


def test_every_file_that_code_or_the_makefile_names_exists():
    files = [*PYTHON, ROOT / "Makefile", *sorted((ROOT / "examples").rglob("*.toml"))]
    missing = {name(file): missing_files(file.read_text()) for file in files}
    assert {file: paths for file, paths in missing.items() if paths} == {}
