import runpy
from pathlib import Path

from millrace.monitoring.catalog import CATALOG, unknown_metrics

ROOT = Path(__file__).parents[2]


def test_metrics_page_is_what_its_script_writes():
    written = runpy.run_path(str(ROOT / "tools" / "write_metrics.py"))
    assert written["PAGE"].read_text() == written["page"]()


def test_catalog_describes_each_metric_once_in_a_sentence():
    names = [name for section in CATALOG.values() for name in section]
    assert len(set(names)) == len(names)
    for section in CATALOG.values():
        assert all(text[0].isupper() or text[0].isdigit() for text in section.values())
        assert all(text.endswith(".") for text in section.values())


def test_capitals_stand_for_names_of_the_run():
    known = ["rewards/a/b/mean", "eval/pass@8", "waiting/engine-0/buffer_full", "staleness/share/3"]
    assert unknown_metrics(known) == []
    assert unknown_metrics(["reward_mean", "scorer/judge/speed"]) == [
        "reward_mean",
        "scorer/judge/speed",
    ]
