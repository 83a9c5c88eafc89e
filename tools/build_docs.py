"""Build the documentation site from README.md, docs/ and other pages of the repository.

The pages are written for GitHub; this script copies them to build/docs, changes their links to the
places in the site, and lists them in the navigation. Their order is that of docs/index.md. A page
that the index does not mention comes last in the section of its folder. A link to a missing page,
heading or file is an error. Run by `make docs`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs"  # the site itself is in build/site
CONFIG = ROOT / "zensical.toml"
# Pages outside docs/ that the site shows, and the two whose names change.
PLACES = {
    "README.md": "index.md",
    "docs/index.md": "contents.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
Nav = list[Any]  # pages, and tables of one section or group each


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    sources = [ROOT / name for name in PLACES]
    sources += [file for file in sorted((ROOT / "docs").rglob("*.*")) if file not in sources]
    for source in sources:
        place = PAGES / place_of(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            place.write_text(with_site_links(source))
        else:
            shutil.copyfile(source, place)
    config = ROOT / "build" / "zensical.toml"
    config.write_text(
        CONFIG.read_text().replace("[project]\n", f"[project]\nnav = {toml(navigation())}\n", 1)
    )
    # zensical has a cache of its own, which hides changes of pages.
    command = ["zensical", "build", "--clean", "--strict", "--config-file", str(config)]
    return subprocess.run(command, env={**os.environ, "NO_COLOR": "1"}, check=False).returncode


def place_of(source: Path) -> Path:
    """Where a file of the repository is in the site."""
    name = source.relative_to(ROOT)
    if str(name) in PLACES:
        return Path(PLACES[str(name)])
    return name.relative_to("docs") if name.is_relative_to("docs") else Path("files") / name


def with_site_links(source: Path) -> str:
    """The text of a page whose links lead to places in the site. Files outside docs/ are copied."""
    here = place_of(source).parent

    def changed(link: re.Match[str]) -> str:
        if link[2].startswith(("http://", "https://")):
            return link[0]
        target = (source.parent / link[2]).resolve()
        if not target.is_file():
            sys.exit(f"{source.relative_to(ROOT)} links to {link[2]}, which is not a file.")
        place = place_of(target)
        if place.parts[0] == "files":
            (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, PAGES / place)
        return link[1] + os.path.relpath(place, here) + link[3]

    return LINK.sub(changed, source.read_text())


def navigation() -> Nav:
    """Sections of docs/index.md. A line of the form `- Label: links` is a group in its section."""
    sections: dict[str, Nav] = {}
    listed: set[str] = set()
    index = (ROOT / "docs" / "index.md").read_text()
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        pages = sections.setdefault(title, [])
        for item in re.split(r"^- ", body, flags=re.M)[1:]:
            found = [link[2] for link in LINK.finditer(item) if link[2] not in listed]
            listed.update(found)
            label = re.match(r"([^\[\]`]+): \[", item)
            pages += [{label[1]: found}] if label and found else found
    for page in sorted((ROOT / "docs").rglob("*/*.md")):
        name = str(page.relative_to(ROOT / "docs"))
        if name not in listed:
            section = next(s for s in sections if s.lower().startswith(name.split("/")[0]))
            sections[section].append(name)
    project = ["contents.md", "examples.md", "contributing.md", "changelog.md"]
    return [{"Home": "index.md"}, *({k: v} for k, v in sections.items()), {"Project": project}]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml(one)}' for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return f'"{value}"'


if __name__ == "__main__":
    sys.exit(main())
