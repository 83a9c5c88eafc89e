"""The self-test of a model: what Millrace computes is what transformers computes, or is refused."""

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, MIXTURES, RECURRENT, tiny_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PhimoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from millrace.core.errors import ConfigError
from millrace.inference.embedded.self_test import SINGLE_STEPS
from millrace.models.attention.packed import PACKED
from millrace.models.directory import context_limit, context_note, max_positions
from millrace.models.shrinking import chosen_layers, shrunk, thresholds
from millrace.models.support import PROBE_ATTENTION, check_supported, find_obstacle

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "write_architectures.py"))
PATHS = {"trainer": PACKED, "engine": SINGLE_STEPS}
MOST_USED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "mistral",
    "mixtral",
    "phi3 (LongRoPE)",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "mamba",
)


@pytest.mark.parametrize("name", MOST_USED)
def test_table_of_architectures_is_up_to_date(name):
    assert TABLE["row"](name) in TABLE["PAGE"].read_text()


@pytest.mark.slow
def test_whole_table_of_architectures_is_up_to_date():
    assert TABLE["page"]() == TABLE["PAGE"].read_text()


def test_each_refusal_in_the_table_is_one_sentence_in_plain_words():
    """It has no further sentence, no text of an exception and no name from the code of a model."""
    reasons = re.findall(r"\| no \| (.+) \|$", TABLE["PAGE"].read_text(), re.MULTILINE)
    assert len(reasons) > 50
    plain = re.compile(r"(it|its|in its|an|a) [a-z][^.:;()\[\]{}`_=*^\\]*")
    assert [reason for reason in reasons if not plain.fullmatch(reason)] == []


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES, *RECURRENT])
def test_models_of_other_tests_pass(architecture):
    config = tiny_model(architecture).config
    assert find_obstacle(config, attention=SINGLE_STEPS) is None


def refusal(config, path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_supported(config, path="some/model", attention=PATHS[path], trust_remote_code=False)
    message = str(caught.value)
    assert message.startswith("Model 'some/model' (")
    assert "\n" not in message
    assert "millrace" not in message
    return message


SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def test_attention_that_is_called_twice_in_a_layer_is_refused_by_the_engine():
    config = DiffLlamaConfig(**SHAPE)
    assert find_obstacle(config, attention=PACKED) is None
    message = refusal(config, "engine")
    assert "(diffllama)" in message
    assert re.search(r"the engine's logprobs differ from those of transformers by [0-9.]+", message)
    assert "nats, from layer 0 on, because a layer calls attention 2 times" in message


@pytest.mark.parametrize("path", PATHS)
def test_a_window_that_only_the_mask_knows_is_refused_unless_it_spans_the_context(path):
    shape = {**SHAPE, "num_local_experts": 4, "max_position_embeddings": 100}
    message = refusal(PhimoeConfig(**shape, sliding_window=99), path)
    assert "because the window of 99 tokens reaches the attention mask alone" in message
    spanning = PhimoeConfig(**shape, sliding_window=100)
    assert find_obstacle(spanning, attention=PATHS[path]) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("falcon_h1", "lm_head_multiplier", 0.04),
        ("hyperclovax", "logits_scaling", 0.125),
        ("granite", "logits_scaling", 8.0),
        ("cohere", "logit_scale", 0.25),
    ],
)
def test_logits_are_scaled_as_checkpoints_of_an_architecture_ask(name, setting, value, path):
    config = TABLE["config_of"](name)
    setattr(config, setting, value)
    assert find_obstacle(config, attention=PATHS[path]) is None


def test_the_context_of_longrope_ends_where_its_factors_change():
    config = TABLE["config_of"]("phi3 (LongRoPE)")
    assert max_positions(config) == 4096
    assert context_limit(config, "phi", wanted=None, setting="") == 4096
    assert context_limit(config, "phi", wanted=4096, setting="") == 4096
    with pytest.raises(ConfigError, match="4096 tokens that 'phi' allows, because LongRoPE"):
        context_limit(config, "phi", wanted=4097, setting="engine.max_context")


def test_a_limit_below_the_stated_context_is_named_unless_a_setting_chose_it(tmp_path):
    TABLE["config_of"]("phi3 (LongRoPE)").save_pretrained(tmp_path)
    path, setting = str(tmp_path), "engine.max_context"
    note = context_note(path, wanted=None, setting=setting)
    assert note is not None
    assert note.startswith("Sequences end at 4096 tokens (engine.max_context), not at the 131072 ")
    assert f"that {path!r} states, because LongRoPE computes longer sequences with other" in note
    assert note.endswith("; set engine.max_context to choose a limit up to 4096.")
    assert context_note(path, wanted=4096, setting=setting) is None


def test_no_limit_is_named_if_the_model_has_all_of_its_stated_context(tmp_path):
    TABLE["config_of"]("qwen3").save_pretrained(tmp_path)
    assert context_note(str(tmp_path), wanted=None, setting="engine.max_context") is None


@pytest.mark.parametrize("path", PATHS)
def test_sequences_in_several_chunks_are_computed_as_transformers_computes_them(path):
    config = TABLE["config_of"]("llama4_text")
    assert max_positions(config) == 131072
    assert thresholds(config) == [8192]
    assert find_obstacle(config, attention=PATHS[path]) is None


class ShiftingConfig(LlamaConfig):
    model_type = "shifting"


class ShiftingForCausalLM(LlamaForCausalLM):
    """Positions depend on the longest sequence of the pass, as those of LongRoPE do."""

    config_class = ShiftingConfig

    def __init__(self, config):
        super().__init__(config)
        rotate = self.model.rotary_emb.forward
        self.model.rotary_emb.forward = lambda x, position_ids: rotate(
            x, position_ids * (2 if position_ids.max() > 7 else 1)
        )


class FixedConfig(LlamaConfig):
    model_type = "fixed"


class FixedForCausalLM(LlamaForCausalLM):
    """Chooses its attention when it is made, as much remote code does."""

    config_class = FixedConfig

    def __init__(self, config):
        {"eager": LlamaAttention}[config._attn_implementation]
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.config = copy.deepcopy(config)


@pytest.fixture
def registered():
    for config, model in (
        (ShiftingConfig, ShiftingForCausalLM),
        (FixedConfig, FixedForCausalLM),
        (BrokenConfig, BrokenForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


@pytest.mark.parametrize("path", PATHS)
def test_positions_that_depend_on_the_batch_are_refused(registered, path):
    message = refusal(ShiftingConfig(**SHAPE), path)
    assert "from layer 0 on" in message


def test_attention_that_cannot_be_replaced_is_refused(registered):
    message = refusal(FixedConfig(**SHAPE), "engine")
    assert "does not go through transformers' AttentionInterface" in message


class BrokenConfig(LlamaConfig):
    model_type = "broken"


class BrokenAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        if self.config._attn_implementation not in ("eager", PROBE_ATTENTION):
            self.missing_state.clear()
        return super().forward(*args, **kwargs)


class BrokenForCausalLM(LlamaForCausalLM):
    """Its second layer fails with any other attention than that of transformers."""

    config_class = BrokenConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.self_attn.__class__ = BrokenAttention


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_names_the_layer_and_the_cause_and_chains_the_error(registered, path):
    config = BrokenConfig(**SHAPE)
    message = refusal(config, path)
    assert message.endswith(
        f"it does not run with the attention of the {path}, from layer 1 on, because its code looks"
        " up a setting or a layer that it does not have; use a decoder-only transformer such as"
        " Llama, Qwen or Gemma."
    )
    with pytest.raises(ConfigError) as caught:
        check_supported(config, path="m", attention=PATHS[path], trust_remote_code=False)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "missing_state" in str(caught.value.__cause__)


def test_the_copy_is_small_and_keeps_the_order_of_thresholds():
    config = Phi3Config(
        num_hidden_layers=32,
        sliding_window=2047,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters=TABLE["config_of"]("phi3 (LongRoPE)").rope_parameters,
    )
    small = shrunk(config)
    assert small.num_hidden_layers == 2
    assert thresholds(config) == [2047, 4096]
    window, original = thresholds(small)
    assert window == small.sliding_window < original < small.max_position_embeddings < 64
    assert len(small.rope_parameters["long_factor"]) == 8
    assert config.num_hidden_layers == 32


def test_the_copy_has_a_layer_of_every_kind():
    config = TABLE["config_of"]("gemma3_text")
    assert chosen_layers(config) == [0, config.layer_types.index("full_attention")]
    assert shrunk(config).layer_types == ["sliding_attention", "full_attention"]


def layer_kinds(config) -> set[tuple[tuple[str, str], ...]]:
    """The names and classes of the modules in each layer."""
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    return {
        tuple((name, type(module).__name__) for name, module in layer.named_modules())
        for layer in layers
    }


@pytest.mark.parametrize(
    ("name", "settings", "num_kinds"),
    [
        ("deepseek_v3", {}, 2),
        ("glm4_moe", {"first_k_dense_replace": 3}, 2),
        ("lfm2_moe", {"layer_types": ["conv", "conv", "full_attention", "conv"]}, 3),
        ("afmoe", {"num_dense_layers": 2}, 2),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, 2),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2}, 2),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, 2),
        ("qwen3_moe", {"decoder_sparse_step": 3}, 2),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, 2),
        ("llama4_text", {"interleave_moe_layer_step": 2}, 3),
        ("exaone_moe", {"first_k_dense_replace": 3}, 2),
        ("jamba", {"num_hidden_layers": 8}, 3),
        ("bamba", {"attn_layer_indices": [2]}, 2),
    ],
)
def test_the_copy_of_a_mixture_or_hybrid_has_every_kind_of_layer(name, settings, num_kinds):
    config = CONFIG_MAPPING[name](**{"num_hidden_layers": 4, **settings})
    kinds = layer_kinds(config)
    assert len(kinds) == num_kinds
    assert layer_kinds(shrunk(config)) == kinds
    assert shrunk(config, num_layers=1).num_hidden_layers == 1
    if name != "jamba":
        assert shrunk(config).num_hidden_layers <= 3


def test_the_copy_of_mamba2_runs():
    assert find_obstacle(CONFIG_MAPPING["mamba2"](), attention=PACKED) is None


def test_a_self_test_leaves_random_numbers_and_the_configuration_alone():
    config = LlamaConfig(**SHAPE)
    before = config.to_json_string()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert find_obstacle(config, attention=PACKED) is None
    torch.testing.assert_close(torch.rand(2), expected, rtol=0, atol=0)
    assert config.to_json_string() == before
