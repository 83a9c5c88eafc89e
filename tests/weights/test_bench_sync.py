import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.bench.sync import copy_ms, main, shape_of


@pytest.mark.parametrize("wanted", [100e6, 1.7e9])
def test_the_model_has_about_the_parameters_asked_for(wanted: float):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(wanted))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(wanted, rel=0.1)


def test_a_copy_takes_time():
    assert copy_ms(10**6, device="cpu") > 0


@pytest.mark.slow
def test_a_row_says_what_the_contract_asks(tmp_path: Path):
    out = tmp_path / "sync.json"
    arguments = ["--parameters", "1e6", "--versions", "2", "--device", "cpu"]
    assert main([*arguments, "--transports", "shm", "--json", str(out)]) == 0
    [row] = json.loads(out.read_text())
    assert (row["transport"], row["payload"]) == ("shm", "full")
    for key in (
        "bytes",
        "publish_to_visible_ms_p50",
        "decode_gap_ms_p50",
        "decode_gap_ms_p99",
        "trainer_stall_ms_p50",
        "floor_ms",
        "tokens_per_s",
        "tokens_per_s_publishing",
    ):
        assert row[key] > 0, key
