"""`millrace bench engine` on a tiny model: prefill and decoding, together and alone."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.bench.engine import main
from millrace.bench.train import flops_of
from millrace.bench.workloads import shapes
from millrace.core.errors import ConfigError

# A prompt whose last token alone is left after the blocks that the prefix cache has.
PROMPT_TOKENS, NEW_TOKENS, BATCH = 49, 40, 3


FP8 = ["--quantization", "fp8", "--kv-cache-dtype", "fp8"]


@pytest.mark.parametrize(
    "loop",
    [[], ["--decode-steps", "4"], ["--decode-steps", "4", *FP8]],
    ids=["single steps", "decode loop", "FP8"],
)
def test_prefill_and_decoding_are_measured_alone(tmp_path, capsys, loop):
    file = tmp_path / "rows.json"
    sizes = ["--prompt-tokens", str(PROMPT_TOKENS), "--new-tokens", str(NEW_TOKENS)]
    arguments = ["--model", "tiny", "--device", "cpu", "--batch", str(BATCH), *sizes, *loop]
    assert main([*arguments, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    # Both phases together take longer than either.
    assert row["decode_tokens_per_s"] > 0
    assert row["prefill_tokens_per_s"] > row["tokens_per_s"] * PROMPT_TOKENS / NEW_TOKENS
    assert 0 < row["prefill_share"] < 1
    assert 0 < row["decode_share"] < 1
    # At most the token of the prefill and those of one launch come before the decoding.
    assert NEW_TOKENS < 2 * (row["decode_context"] - PROMPT_TOKENS) <= NEW_TOKENS + 5
    header, line = capsys.readouterr().out.splitlines()
    assert "prefill/s" in header
    assert f"{row['prefill_tokens_per_s']:,.0f}" in line


def test_sequences_that_do_not_fit_together_are_refused():
    arguments = ["--model", "tiny", "--device", "cpu", "--batch", "2", "--prompt-tokens", "40"]
    with pytest.raises(ConfigError, match=r"KV cache of 4 blocks.* need 6; raise --kv-bytes"):
        main([*arguments, "--new-tokens", "8", "--kv-bytes", "1.4e5"])


@pytest.mark.parametrize("passes", [1, 3])
def test_flops_of_a_prompt_are_those_of_its_products(passes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes()["tiny"])
    hidden, mlp, layers, vocab, length = 128, 512, 4, 1024, 10
    heads, head_dim = 4, 32
    of_layer = 2 * hidden * heads * head_dim + 2 * hidden * 2 * head_dim + 3 * hidden * mlp
    pairs = length * (length + 1) // 2
    expected = 2 * length * layers * of_layer + 2 * vocab * hidden
    expected += 4 * pairs * heads * head_dim * layers
    found = flops_of(model, np.array([length]), num_targets=1, passes=passes)
    assert found == passes * expected
