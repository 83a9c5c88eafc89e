"""PEFT folders as adapters of an engine: read as PEFT reads them, or refused in one sentence."""

import json
from pathlib import Path

import peft
import pytest
import torch
from architectures import tiny_model
from safetensors.torch import load_file, save_file

from millrace.core.errors import ConfigError
from millrace.models.lora.folders import check_resident, read_resident


@pytest.fixture
def folder(tmp_path) -> Path:
    """As PEFT itself saves one."""
    save_with_peft(tmp_path, target_modules=["q_proj", "down_proj"])
    return tmp_path


def save_with_peft(folder: Path, **settings) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(tiny_model("qwen3"), config).save_pretrained(str(folder))


def change_settings(folder: Path, **settings) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dora", [False, True])
def test_a_folder_saved_by_peft_is_read(tmp_path, dora):
    save_with_peft(tmp_path, target_modules=["q_proj"], use_rslora=True, use_dora=dora)
    adapter = read_resident("judge", tmp_path, model=tiny_model("qwen3"))
    assert (adapter.rank, adapter.scale, adapter.is_dora) == (4, 3.0, dora)
    assert adapter.layers == {f"model.layers.{i}.self_attn.q_proj": (32, 32) for i in (0, 1)}
    assert {n: tuple(t.shape) for n, t in adapter.tensors.items()} == adapter.shapes()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, r"adapter of type IA3; only LORA"),
        ({"bias": "all"}, r"made with bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"made with modules_to_save = \['lm_head'\]"),
        ({"alpha_pattern": {"q_proj": 3}}, r"made with alpha_pattern"),
        ({"init_lora_weights": "pissa"}, r"made with init_lora_weights = 'pissa'"),
        ({"use_dora": True}, r"lacks the tensor .*lora_magnitude_vector"),
        ({"r": 8}, r"lora_A\.weight' as \(4, 48\), where this model needs \(8, 48\)"),
    ],
)
def test_settings_that_would_compute_something_else_are_refused(folder, settings, reason):
    change_settings(folder, **settings)
    with pytest.raises(ConfigError, match=rf"engine\.adapters\.judge = .*{reason}"):
        read_resident("judge", folder, model=tiny_model("qwen3"))


LAYER = "base_model.model.model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(f"{LAYER}.lora_B.weight"), r"lacks the tensor 'model\.layers\.0"),
        (
            lambda t: t.update({f"{LAYER}.lora_C": torch.ones(1)}),
            r"lora_C', which does not belong to",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}),
            r"adapts 'lm_head', which is not a linear layer of this model, or is its head",
        ),
        (
            lambda t: t.update({f"{LAYER}.lora_A.weight": torch.ones(4, 96)}),
            r"as \(4, 96\), where this model needs \(4, 48\); use an adapter that was trained on",
        ),
        (lambda t: t.clear(), "has no tensors"),
    ],
    ids=["lacking", "unknown tensor", "head", "another size", "empty"],
)
def test_tensors_that_do_not_fit_the_model_are_named(folder, change, reason):
    change_tensors(folder, change)
    with pytest.raises(ConfigError, match=reason):
        read_resident("judge", folder, model=tiny_model("qwen3"))


def test_an_adapter_of_a_model_with_other_layers_is_refused(folder):
    name = f"{LAYER.replace('0', '7')}.lora_A.weight"
    change_tensors(folder, lambda t: t.update({name: torch.ones(4, 48)}))
    with pytest.raises(
        ConfigError, match=r"layers\.7\.mlp\.down_proj', which is not a linear layer"
    ):
        read_resident("judge", folder, model=tiny_model("qwen3"))


def test_folders_that_hold_no_adapter_are_refused_before_any_model_is_loaded(folder):
    check_resident("judge", folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"judge = .* damaged adapter_config\.json"):
        check_resident("judge", folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; set it to a folder"):
        check_resident("judge", folder)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        check_resident("judge", folder / "nowhere")


def test_a_damaged_weights_file_is_refused(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 5)
    with pytest.raises(ConfigError, match=r"judge = .* cannot be read"):
        read_resident("judge", folder, model=tiny_model("qwen3"))


def test_tensors_that_do_not_fit_each_other_are_refused(folder):
    change_settings(folder, target_parameters=["mlp.experts.down_proj"])
    experts = {"base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.zeros(7, 4)}
    save_file(experts, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"judge = .* cannot be read"):
        read_resident("judge", folder, model=tiny_model("qwen3"))
