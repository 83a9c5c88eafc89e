import json
from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)

from millrace.core.errors import ConfigError
from millrace.models.attention.packed import PACKED, PACKED_ATTENTION, PackedLayout
from millrace.models.devices import resolve_device, use_threads
from millrace.models.directory import check_directory, context_length, load_tokenizer
from millrace.models.loading import (
    generation_stop_ids,
    hidden_states,
    load_model,
    stop_token_ids,
)

CPU = torch.device("cpu")


def load(path, *, dtype=torch.float32):
    return load_model(str(path), dtype=dtype, device=CPU, attention=PACKED)


@pytest.fixture
def saved(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_oss", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_architectures_load_in_the_dtype_asked_for(tmp_path, architecture, dtype):
    tiny_model(architecture).save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype)
    assert not model.training
    assert model.dtype == dtype
    frequencies = [buffer for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert context_length(str(tmp_path), wanted=None, setting="") == 256
    tokens = torch.randint(0, VOCAB, (1, 6))
    hidden = hidden_states(
        model,
        input_ids=tokens,
        position_ids=torch.arange(6)[None],
        layout=PackedLayout([6], device=CPU),
    )
    assert hidden.shape == (6, model.config.hidden_size)


def save_in_mxfp4(folder, model):
    """As GPT-OSS comes: blocks of 32 inputs with one exponent, two values in a byte."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("experts.gate_up_proj")]:
        num_experts, _, num_out = weights.pop(name).shape
        blocks = torch.full((num_experts, num_out, 1, 16), 0x52, dtype=torch.uint8)  # 1 and 3
        weights[f"{name}_blocks"] = blocks
        weights[f"{name}_scales"] = torch.full(blocks.shape[:3], 126, dtype=torch.uint8)  # 2**-1
    for name in [name for name in weights if name.endswith("experts.down_proj")]:
        num_experts, _, num_out = weights.pop(name).shape  # 48 inputs are no whole blocks
        blocks = torch.zeros(num_experts, num_out, 2, 12, dtype=torch.uint8)
        weights[f"{name}_blocks"] = blocks
        weights[f"{name}_scales"] = torch.zeros(blocks.shape[:3], dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_experts_in_mxfp4_are_loaded_and_saved_as_plain_weights(tmp_path, dtype):
    """The model computes what its plain copy does, at positions that need exact frequencies."""
    save_in_mxfp4(tmp_path, tiny_model("gpt_oss"))
    model = load(tmp_path, dtype=dtype)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.dtype == dtype
    assert experts[0, :4, 0].tolist() == [0.5, 1.5, 0.5, 1.5]
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", dtype=dtype)
    assert torch.equal(again.model.layers[0].mlp.experts.gate_up_proj, experts)
    states = [
        hidden_states(
            one,
            input_ids=torch.arange(200)[None] % VOCAB,
            position_ids=torch.arange(200)[None],
            layout=PackedLayout([200], device=CPU),
        )
        for one in (model, again)
    ]
    assert torch.equal(*states)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"nor a model that the hub gives \(ConnectError\)"):
        load_tokenizer("somebody/model", trust_remote_code=False)


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere' does not exist; check model\.path"):
        load(tmp_path / "nowhere")


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        load_tokenizer(str(tmp_path))


def test_damaged_weights_are_one_sentence(saved):
    (saved / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError) as caught:
        load(saved)
    assert str(caught.value).startswith(f"Model '{saved}' cannot be loaded: ")
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_is_one_sentence(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "model_type": "perceptron"}))
    with pytest.raises(ConfigError, match=r"cannot be read: .*perceptron") as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused(saved):
    weights = load_file(saved / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights, 'model.norm.weight'"):
        load(saved)


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
REFUSED = {
    "own attention": (
        lambda: BloomForCausalLM(
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
        ),
        "does not go through transformers' AttentionInterface",
    ),
    "own head": (
        lambda: ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**SHAPE)),
        "its logits are not the product of its hidden states and its head",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_architecture_is_refused(tmp_path, case):
    make, reason = REFUSED[case]
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"is not supported: .*{reason}"):
        load(tmp_path)


def test_stop_ids_join_the_generation_settings_and_the_tokenizer():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [9, 2]
    assert stop_token_ids(model.generation_config, SimpleNamespace(eos_token_id=5)) == (2, 5, 9)
    model.generation_config.eos_token_id = 2
    assert stop_token_ids(model.generation_config, SimpleNamespace(eos_token_id=2)) == (2,)
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model.generation_config, SimpleNamespace(eos_token_id=None)) == ()


def test_stop_ids_of_a_model_with_code_of_its_own_are_read_if_it_is_trusted(tmp_path):
    tiny_model("llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = ["from transformers import LlamaConfig", "class Own(LlamaConfig): model_type = 'own'"]
    (tmp_path / "own.py").write_text("\n".join(code))
    tokenizer = SimpleNamespace(eos_token_id=2)
    found = generation_stop_ids(str(tmp_path), tokenizer, trust_remote_code=True)
    assert found == (2, 7)
    with pytest.raises(ConfigError, match="contains custom code"):
        generation_stop_ids(str(tmp_path), tokenizer)


def test_devices_are_resolved_or_refused():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="'quantum' is unknown"):
        resolve_device("quantum")
    with pytest.raises(ConfigError, match="'cuda:99' does not exist"):
        resolve_device("cuda:99")


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a LoRA adapter .*lora\.export_merged"):
        check_directory(str(tmp_path))


def test_workers_on_arm_leave_products_to_blas(monkeypatch):
    """oneDNN would use all cores there, whatever the number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    try:
        use_threads(1)
        assert torch.get_num_threads() == 1
        assert not torch.backends.mkldnn.enabled
    finally:
        torch.set_num_threads(threads)
