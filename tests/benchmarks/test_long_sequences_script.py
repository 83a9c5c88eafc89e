"""benchmarks/long_sequences.py on a tiny model, beyond the positions of its shape."""

import json

import long_sequences
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.bench.workloads import shape_named, with_positions

torch.set_num_threads(1)

TOKENS, NEW_TOKENS = 4096, 16


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--lora", "2"]], ids=["all weights", "adapter"])
def test_one_sequence_is_generated_and_trained_at_all_its_positions(tmp_path, options):
    assert shape_named("tiny").max_position_embeddings < TOKENS
    file = tmp_path / "result.json"
    sizes = ["--tokens", str(TOKENS), "--prompt-tokens", str(TOKENS - NEW_TOKENS)]
    assert long_sequences.main(["--device", "cpu", *sizes, *options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["model"], result["tokens"]) == ("tiny", TOKENS)
    assert result["generated_tokens_per_s"] == pytest.approx(NEW_TOKENS / result["generate_s"])
    assert result["trained_tokens_per_s"] == pytest.approx(TOKENS / result["train_step_s"])
    # In float32 both halves compute the same logprobs, at the last positions, too.
    assert result["logprob_mismatch"] < 1e-4
    assert result["train_peak_bytes"] is result["generate_peak_bytes"] is None


def test_a_shape_keeps_its_positions_unless_it_needs_more():
    before = shape_named("tiny")
    assert with_positions(shape_named("tiny"), 2048).to_dict() == before.to_dict()
    longer = with_positions(shape_named("tiny"), 8192)
    assert longer.max_position_embeddings == 8192
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(longer)
    assert model.base_model.rotary_emb.rope_type == "yarn"


def test_a_prompt_that_leaves_no_token_to_generate_is_refused(capsys):
    with pytest.raises(SystemExit):
        long_sequences.main(["--device", "cpu", "--tokens", "64", "--prompt-tokens", "64"])
    assert "--prompt-tokens 64 is not within 1..63" in capsys.readouterr().err
