"""benchmarks/speculation.py on a tiny model with random prompts."""

import json

import speculation


def test_retries_are_drafted_and_give_the_same_tokens(tmp_path):
    file = tmp_path / "rows.json"
    sizes = ["--live", "1", "4", "--new-tokens", "24", "--repeats", "1", "--device", "cpu"]
    assert speculation.main(["tiny", "--only", "retries", *sizes, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["workload"], row["live"]) for row in rows] == [("retries", 4), ("retries", 1)]
    for row in rows:
        assert row["device"] == "cpu"
        assert row["plain"] > 0
        assert row["drafts"] > 0
        assert row["differing"] == 0
