"""Tiny randomly initialised models of several architectures, made by seed."""

import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from millrace.models.support import name_backbone

VOCAB = 64
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3")
RECURRENT = ("qwen3_next", "lfm2")  # layers with a recurrent state beside attention
HYBRIDS = ("qwen3_5", "falcon_h1", "nemotron_h", "granite4")  # further ones
MIXTURE = "qwen3_moe"
WIDE_MIXTURE = "qwen3_moe, wide"  # its sizes are those of the kernels of experts
MIXTURES = (MIXTURE, "qwen2_moe", "mixtral", "gpt_oss", "glm4_moe")
# Routers of other kinds, and mixtures with recurrent states.
OTHER_MIXTURES = ("phimoe", "deepseek_v2", "qwen3_next", "granite4", "llama4")
NUM_EXPERTS = 8
TOP_K = 2
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # far from uniform, so that mistakes show in the logits
}


_MAMBA = {
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8),
    "mamba_n_groups": 1,
}
# Keys and values are compressed, with their rotary part beside it.
_COMPRESSED = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}
_EXPERTS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}


def tiny_model(architecture: str, *, seed: int = 0, num_layers: int = 2) -> PreTrainedModel:
    """Qwen 2 has biases; Mistral has a window of 8 in all layers, Gemmas and GPT-OSS in one of two;
    Gemma 2 softcaps, and GPT-OSS has sinks. The first layer of RECURRENT ones has a state. Routers
    of mixtures are far from undecided."""
    torch.manual_seed(seed)
    shape = {**_SHAPE, "num_hidden_layers": num_layers}
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(**shape, sliding_window=8)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)),
        # Its layer norms have biases, and its matrices are no linear layers.
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**{**shape, "n_inner": 48, "initializer_range": 0.1})
        ),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(
                **shape, **windows, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
            )
        ),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**shape, **windows)),
        "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**shape, **_EXPERTS)
        ),
        WIDE_MIXTURE: lambda: transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **{**shape, **_EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64}
            )
        ),
        "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
            transformers.Qwen2MoeConfig(**shape, **_EXPERTS, shared_expert_intermediate_size=16)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **shape, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
            )
        ),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                **shape, **windows, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
            )
        ),
        "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(
                **shape,
                **_EXPERTS,
                shared_expert_intermediate_size=16,
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            )
        ),
        "lfm2": lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**shape, layer_types=["conv", "full_attention"])
        ),
        "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(
            transformers.Qwen3_5TextConfig(
                **shape,
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            )
        ),
        # Each layer has attention and Mamba side by side.
        "falcon_h1": lambda: transformers.FalconH1ForCausalLM(
            transformers.FalconH1Config(**shape, **_MAMBA, mamba_d_ssm=64)
        ),
        "granite4": lambda: transformers.GraniteMoeHybridForCausalLM(
            transformers.GraniteMoeHybridConfig(
                **shape,
                **_MAMBA,
                layer_types=["mamba", "attention"],
                num_local_experts=NUM_EXPERTS,
                num_experts_per_tok=TOP_K,
                shared_intermediate_size=16,
                position_embedding_type="rope",
            )
        ),
        # Mamba, attention and a dense layer.
        "nemotron_h": lambda: transformers.NemotronHForCausalLM(
            transformers.NemotronHConfig(
                **{**shape, "num_hidden_layers": 3},
                hybrid_override_pattern="M*-",
                mamba_num_heads=8,
                mamba_head_dim=8,
                n_groups=1,
                ssm_state_size=8,
                chunk_size=8,
            )
        ),
        # Layers attend within chunks, a third without rotary embeddings attends to all tokens with
        # scaled queries, and one expert of each token has a shared one beside it.
        "llama4": lambda: transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(
                **{**shape, "num_hidden_layers": 3},
                intermediate_size_mlp=48,
                attention_chunk_size=12,
                floor_scale=10,
                no_rope_layers=[1, 1, 0],
                interleave_moe_layer_step=2,
                num_local_experts=NUM_EXPERTS,
                num_experts_per_tok=1,
            )
        ),
        # Its router chooses by two calls of max, and gives weights by two softmaxes.
        "phimoe": lambda: transformers.PhimoeForCausalLM(
            transformers.PhimoeConfig(
                **shape,
                num_local_experts=NUM_EXPERTS,
                num_experts_per_tok=TOP_K,
                sliding_window=None,
            )
        ),
        # Experts come in four groups, of which two are chosen before experts are.
        "deepseek_v2": lambda: transformers.DeepseekV2ForCausalLM(
            transformers.DeepseekV2Config(
                **{**shape, **_COMPRESSED},
                n_routed_experts=NUM_EXPERTS,
                num_experts_per_tok=TOP_K,
                moe_intermediate_size=16,
                n_shared_experts=1,
                first_k_dense_replace=1,
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                q_lora_rank=None,
            )
        ),
        # Queries are compressed, too.
        "minicpm3": lambda: transformers.MiniCPM3ForCausalLM(
            transformers.MiniCPM3Config(
                **{**shape, **_COMPRESSED, "initializer_range": 0.1}, q_lora_rank=16
            )
        ),
        # So they are here, and its first layer is dense.
        "glm4_moe_lite": lambda: _glm4_moe_lite({**shape, **_COMPRESSED}, q_lora_rank=16),
        "glm4_moe_lite, plain queries": lambda: _glm4_moe_lite(
            {**shape, **_COMPRESSED}, q_lora_rank=None
        ),
        # One matrix gives queries, keys and values, and one both parts of the MLP.
        "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**shape)),
        # Its first layer is dense, and experts come in two groups, of which one is chosen.
        "glm4_moe": lambda: transformers.Glm4MoeForCausalLM(
            transformers.Glm4MoeConfig(
                **shape,
                n_routed_experts=NUM_EXPERTS,
                num_experts_per_tok=TOP_K,
                moe_intermediate_size=16,
                n_shared_experts=1,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
            )
        ),
    }[architecture]()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter)
        if name.endswith(("mlp.gate.weight", "mlp.router.weight", "sinks")):
            torch.nn.init.normal_(parameter)
    name_backbone(model)
    return model.eval()


def _glm4_moe_lite(shape: dict[str, int], *, q_lora_rank: int | None) -> PreTrainedModel:
    config = transformers.Glm4MoeLiteConfig(
        **shape,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        q_lora_rank=q_lora_rank,
    )
    return transformers.Glm4MoeLiteForCausalLM(config)
