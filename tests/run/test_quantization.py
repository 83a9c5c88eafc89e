"""What lora.quantization cannot be combined with, and the sentence it earns."""

import pytest
from tiny_model import make_tiny_model

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.run.checks import check_settings
from millrace.run.prepare import check_model

NF4 = {"lora": {"quantization": "nf4"}}


def refusal_of(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(load_config({"model": "m", **NF4, **sections}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"ranks": 2}}, "does not support trainer.ranks = 2; change it, or leave"),
        ({"engine": {"type": "vllm"}}, "engine.type = 'vllm', which loads the base in full"),
        ({"engine": {"dtype": "float16"}}, "engine.dtype = 'float16', which rounds the base"),
        ({"weights": {"probe": True}}, "weights.probe = true, which reads the base in full"),
    ],
)
def test_settings_that_would_compute_over_another_base_are_refused(sections, message):
    assert message in refusal_of(**sections)
    check_settings(load_config({"model": "m", "lora": {}, **sections}))


def test_exact_mode_is_refused_as_with_any_adapter():
    assert "fidelity.mode = 'exact' does not support [lora]" in refusal_of(
        fidelity={"mode": "exact"}
    )


def test_fp8_engines_and_dora_are_allowed():
    engine = {"options": {"quantization": "fp8"}}
    lora = {"quantization": "nf4", "dora": True}
    check_settings(load_config({"model": "m", "lora": lora, "engine": engine}))


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"lora\.quantization"):
        load_config({"model": "m", "lora": {"quantization": "int4"}})


def test_experts_are_refused_before_the_start(tmp_path):
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    make_tiny_model(dense)
    make_tiny_model(mixture, num_experts=4)
    (note,) = check_model(load_config({"model": str(dense), **NF4}))
    assert note.startswith("LoRA of rank 16 adapts 14 linear layers")
    with pytest.raises(ConfigError, match=r"'nf4' does not support experts such as 'model\.layers"):
        check_model(load_config({"model": str(mixture), **NF4}))
