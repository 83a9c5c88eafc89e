"""Adapters are PEFT's: chosen, made, saved, merged and refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.config import LoraConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.models.loading import write_model
from millrace.models.lora.factors import adapted_layers, require_peft
from millrace.models.lora.folders import check_same_kind, read_checkpoint
from millrace.models.lora.trained import TrainedAdapter

SETTINGS = {
    "all": LoraConfig(rank=4, alpha=8.0),
    "rslora": LoraConfig(rank=4, alpha=6.5, rslora=True),
    "dora": LoraConfig(rank=4, alpha=8.0, dora=True),
    "some": LoraConfig(rank=3, alpha=16.0, target_modules=("q_proj", "mlp.down_proj")),
}
TOKENS = torch.arange(3, 30)[None]


def adapter_in(model: PreTrainedModel, lora: LoraConfig, *, path: Path | str = "tiny"):
    """An adapter that changes what the model computes."""
    torch.manual_seed(5)
    adapter = TrainedAdapter(model, lora, model_path=str(path))
    for weight in adapter.named_weights().values():
        weight.add_(0.1 * torch.randn_like(weight))
    return adapter


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_linear_is_every_linear_layer_but_the_head(architecture):
    names = adapted_layers(tiny_model(architecture), LoraConfig())
    parts = {name.rpartition(".")[2] for name in names}
    assert parts == {*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
    assert len(names) == 2 * 7


@pytest.mark.parametrize("wrong", ["qproj", "lm_head", "roj"])
def test_an_unknown_target_module_is_named_with_the_valid_ones(wrong):
    lora = LoraConfig(target_modules=("q_proj", wrong))
    with pytest.raises(ConfigError, match=rf"has '{wrong}'.* this model has down_proj, gate_proj"):
        adapted_layers(tiny_model("llama"), lora)


@pytest.mark.parametrize("lora", SETTINGS.values(), ids=SETTINGS)
def test_a_new_adapter_changes_no_output_and_only_it_is_trainable(lora):
    model = tiny_model("qwen3")
    before, linears = logits(model), adapted_layers(model, lora)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5 if lora.dora else 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(adapter.named_weights()) == (2 + lora.dora) * len(linears)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("lora", SETTINGS.values(), ids=SETTINGS)
def test_peft_loads_what_is_saved_and_computes_the_same(architecture, lora, tmp_path):
    model = tiny_model(architecture)
    base = logits(model)
    model.save_pretrained(tmp_path / "model")
    adapter = adapter_in(model, lora, path=tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    adapter.write(adapter.named_weights(), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_model(architecture), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.allclose(logits(model), base, atol=1e-2)
    if lora.dora:
        return  # transformers' own reader, below, does not find PEFT's name for magnitudes
    by_path = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(by_path), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("lora", SETTINGS.values(), ids=SETTINGS)
def test_the_merged_model_loads_with_transformers_and_computes_the_same(
    architecture, lora, tmp_path
):
    model = tiny_model(architecture)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    adapter = adapter_in(model, lora)
    write_model(model, adapter.merged_weights(), tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {name: tuple(p.shape) for name, p in loaded.named_parameters()} == names
    torch.testing.assert_close(logits(loaded.eval()), logits(model), rtol=1e-5, atol=1e-5)


def test_a_saved_adapter_loads_only_into_one_with_the_same_settings(tmp_path):
    lora = SETTINGS["all"]
    adapter = adapter_in(tiny_model("llama"), lora)
    adapter.write(adapter.named_weights(), tmp_path)
    again = TrainedAdapter(tiny_model("llama"), lora, model_path="tiny")
    again.load(tmp_path)
    for name, weight in adapter.named_weights().items():
        assert torch.equal(again.named_weights()[name], weight), name
    other = TrainedAdapter(tiny_model("llama"), SETTINGS["some"], model_path="tiny")
    with pytest.raises(CheckpointError, match=r"differ in 'model\.layers\.0.*lora_A\.weight'"):
        other.load(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 5)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_resuming_with_other_lora_settings_is_refused(tmp_path):
    lora = SETTINGS["all"]
    adapter = adapter_in(tiny_model("llama"), lora)
    adapter.write(adapter.named_weights(), tmp_path)
    check_same_kind(tmp_path, lora)
    with pytest.raises(ConfigError, match=r"lora\.rank = 9, but .* trained with 4"):
        check_same_kind(tmp_path, LoraConfig(rank=9, alpha=8.0))
    with pytest.raises(ConfigError, match=r"lora\.rslora = True, but .* trained with False"):
        check_same_kind(tmp_path, LoraConfig(rank=4, alpha=8.0, rslora=True))
    with pytest.raises(ConfigError, match=r"lora\.dora = True, but .* trained with False"):
        check_same_kind(tmp_path, LoraConfig(rank=4, alpha=8.0, dora=True))
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter; .* add the \[lora\] table"):
        check_same_kind(tmp_path, None)
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"r": 4}))
    with pytest.raises(CheckpointError, match="is damaged"):
        check_same_kind(tmp_path, lora)
    settings.unlink()
    check_same_kind(tmp_path, None)
    with pytest.raises(ConfigError, match="trained without LoRA"):
        check_same_kind(tmp_path, lora)


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    require_peft()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"install millrace\[lora\]"):
        require_peft()
