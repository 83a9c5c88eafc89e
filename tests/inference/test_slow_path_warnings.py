"""Warnings of a slow path on a GPU name its cost."""

import warnings

import pytest
import torch
from architectures import MIXTURE, tiny_model

from millrace.inference.embedded.build import _decode_steps, _single_steps
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


@pytest.mark.parametrize(
    ("dtype", "capability", "is_slow"),
    [
        (torch.float16, (9, 0), True),
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (9, 0), False),
    ],
)
def test_experts_without_a_grouped_kernel_name_their_cost(monkeypatch, dtype, capability, is_slow):
    model = tiny_model(MIXTURE).to(dtype)
    model.set_attn_implementation(PAGED_ATTENTION)
    probe = measure_cache(model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))  # this machine may have none
    monkeypatch.setenv("CC", "true")  # stands for a compiler
    if not is_slow:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _decode_steps(model, None, probe) == 32
        return
    cost = rf"^Experts in {dtype} on this GPU decode in single steps, several times slower than"
    with pytest.warns(UserWarning, match=cost):
        assert _decode_steps(model, 8, probe) == 1


def test_training_without_the_flash_kernel_names_its_cost():
    with pytest.warns(UserWarning, match="because it is a test; .* takes several times as long"):
        _warn("it is a test")
