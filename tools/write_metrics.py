"""Write docs/reference/metrics.md from src/millrace/monitoring/catalog.py:
`python tools/write_metrics.py`.
"""

from pathlib import Path

from millrace.monitoring.catalog import CATALOG

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"
INTRODUCTION = """# Metrics

`metrics.jsonl` in the run directory has one flat JSON object per step. Trackers (`[[tracker]]`)
receive the same names. Words in capitals stand for names that the run supplies; spaces in them
become underscores. A value that is not finite is `null` in the file and left out of trackers. A
loss of your own may add metrics.

One definition of throughput holds everywhere. A sample is an episode that was trained on. A token
is one that a rollout engine generated. Time starts when training begins, after start-up and the
evaluation before the first step. Progress and `throughput/samples_per_s` show the rate of the last
steps. `millrace inspect` and `summary.json` show the mean of the whole run: `throughput/samples`
divided by `throughput/time_s`.

This page is written by `python tools/write_metrics.py` from `src/millrace/monitoring/catalog.py`.
"""


def page() -> str:
    parts = [INTRODUCTION]
    for title, metrics in CATALOG.items():
        rows = [f"| `{name}` | {text} |" for name, text in metrics.items()]
        parts.append("\n".join([f"## {title}\n", "| metric | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
