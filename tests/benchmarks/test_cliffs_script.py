"""benchmarks/cliffs.py on a tiny model."""

import json

import cliffs
import torch

torch.set_num_threads(1)


def test_options_that_change_or_report_logits_are_measured_next_to_plain_decoding(tmp_path):
    file = tmp_path / "rows.json"
    sizes = ["--model", "tiny", "--batch", "3", "--new-tokens", "3", "--rank", "2"]
    only = ["--only", "penalty", "bias", "logprobs", "odd", "LoRA"]
    arguments = [*sizes, *only, "--device", "cpu", "--dtype", "float32"]
    assert cliffs.main([*arguments, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    of_one = [f"{name}, one sequence" for name in ("penalty", "logit bias", "top logprobs")]
    expected = {"plain", "odd batch", "penalty", "top logprobs", *of_one, "LoRA unmerged"}
    assert {row["case"] for row in rows} == expected
    assert rows[0]["ratio"] == 1
    assert all(row["tokens_per_s"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(case.one for case in cliffs.CASES if case.name in of_one)
