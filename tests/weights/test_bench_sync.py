import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.bench.sync import Case, main, settings
from millrace.bench.sync_workers import build_engine, make_weights
from millrace.bench.workloads import copy_s, shape_named
from millrace.core.errors import ConfigError
from millrace.core.records import Request, Sampling


@pytest.mark.parametrize("wanted", ["100e6", "1.7e9", "qwen3-1.7b"])
def test_the_model_has_about_the_parameters_asked_for(wanted: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_named(wanted))
    expected = 1.72e9 if wanted == "qwen3-1.7b" else float(wanted)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.1)


def test_a_model_that_is_not_known_is_refused_before_any_process_starts():
    with pytest.raises(ConfigError, match="--model = 'gpt9' is not known; use qwen3"):
        main(["--model", "gpt9"])


def test_copy_time_is_positive():
    assert copy_s(10**6, device=torch.device("cpu")) > 0


@pytest.mark.parametrize("payload", ["full", "merged"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_engines_swap_weights_in_fp8_if_wanted(
    payload: str, quantization: str | None, tmp_path: Path
):
    sizes = {"model": "tiny", "sequences": 2, "threads": 1, "rank": 2}
    args = argparse.Namespace(device="cpu", dtype="float32", quantization=quantization, **sizes)
    config = settings(args, Case("shm", payload), scratch=tmp_path)
    engine = build_engine(config)
    prepared = engine.prepare(make_weights(config), version=1)
    # FP8 values are copied eight at a time.
    assert any(live.dtype == torch.int64 for live, _ in prepared.pairs) == (quantization == "fp8")
    engine.commit(prepared)
    sampling = Sampling(max_new_tokens=2)
    engine.add_request(Request(id="r", prompt=np.arange(3, 7), sampling=sampling))
    (finished,) = [done for _ in range(3) for done in engine.step()]
    assert finished.completions[0].versions.tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_each_row_has_every_measurement(
    quantization: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    out = tmp_path / "sync.json"
    arguments = ["--model", "1e6", "--versions", "2", "--device", "cpu", "--transports", "shm"]
    if quantization is not None:
        arguments += ["--quantization", quantization]
    assert main([*arguments, "--payloads", "full", "adapter", "--json", str(out)]) == 0
    full, adapter = json.loads(out.read_text())
    assert full["quantization"] == adapter["quantization"] == quantization
    assert (full["transport"], full["payload"]) == ("shm", "full")
    assert (adapter["transport"], adapter["payload"]) == ("shm", "adapter")
    assert adapter["bytes"] < full["bytes"]
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
        assert full[key] > 0, key
        assert adapter[key] > 0, key
    assert full["tokens_share"] < full["tokens_share_minus_copy"]
    assert "shm, adapter: publishing 2 versions" in capfd.readouterr().err
