"""Warnings of a slow path on a GPU name its cost."""

import pytest
from architectures import tiny_model

from millrace.inference.embedded.build import _single_steps
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION, measure_cache
from millrace.models.attention.packed import _warn


@pytest.mark.parametrize(
    ("architecture", "cost"),
    [
        ("gpt_oss", "decodes in single steps, five times slower than with the decode loop"),
        ("qwen3_next", "single steps by the code of transformers, several times slower than with"),
    ],
)
def test_single_decode_steps_name_their_cost(architecture, cost):
    model = tiny_model(architecture)
    model.set_attn_implementation(PAGED_ATTENTION)
    assert cost in _single_steps(model, None, measure_cache(model))


def test_training_without_the_flash_kernel_names_its_cost():
    with pytest.warns(UserWarning, match="because it is a test; .* takes several times as long"):
        _warn("it is a test")
