"""Greedy tokens are those of transformers' generate."""

import functools
from itertools import product

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from engine_rig import EOS, finish_all, make_engine, make_request, prompt_of

LENGTHS = (1, 2, 4, 5, 9, 17, 23, 40)


@functools.cache
def generated(architecture: str) -> list[np.ndarray]:
    """What transformers generates after each prompt."""
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    outputs = []
    for length in LENGTHS:
        ids = torch.from_numpy(prompt_of(length, seed=length)).long()[None]
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert isinstance(output, torch.Tensor)
        outputs.append(output[0, length:].numpy())
    return outputs


SIZES = {
    "roomy": {"prefill_tokens": 64},
    "small-chunks": {"prefill_tokens": 7, "max_sequences": 3},
    "few-blocks": {"prefill_tokens": 11, "num_blocks": 22, "block_tokens": 3},
}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        *product(ARCHITECTURES, SIZES),
        *product(("gpt_oss", "qwen3_next"), ["few-blocks"]),
    ],
)
def test_greedy_tokens_match_transformers_generate(architecture: str, sizes: str):
    engine = make_engine(architecture, **SIZES[sizes])
    requests = [
        make_request(
            str(length), prompt=prompt_of(length, seed=length), temperature=0.0, max_new_tokens=20
        )
        for length in LENGTHS
    ]
    done = finish_all(engine, requests)
    for length, expected in zip(LENGTHS, generated(architecture), strict=True):
        np.testing.assert_array_equal(done[str(length)][0].tokens, expected)


def test_greedy_logprobs_are_at_temperature_one():
    done = finish_all(make_engine(), [make_request(temperature=0.0, top_k=3)])
    completion = done["r"][0]
    assert completion.kept is None
    assert (completion.logprobs < 0).all()
