"""The metrics that docs/reference/metrics.md describes; tests compare rows of runs with them."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"


def described_metrics() -> list[tuple[str, str]]:
    """Name and meaning of each row of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE.read_text(), re.M)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Names that the page does not describe."""
    patterns = [_pattern(name) for name, _ in described_metrics()]
    return [name for name in names if not any(p.fullmatch(name) for p in patterns)]


def _pattern(name: str) -> re.Pattern[str]:
    """Capitals stand for any text; names of scorers may contain slashes."""
    parts = re.split(r"\b([A-Z]+)\b", name)
    return re.compile("".join(".+" if i % 2 else re.escape(p) for i, p in enumerate(parts)))
