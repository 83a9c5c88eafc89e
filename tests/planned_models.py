"""Sizes of published models, as their config.json has them, and runs of these that are planned."""

from millrace.config import load_config
from millrace.plan.lengths import Lengths
from millrace.plan.model_costs import GPUS, ModelShape
from millrace.plan.planned_run import PlannedRun

QWEN_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN_2B = {
    **QWEN_8B,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
}
QWEN_30B = {
    **QWEN_2B,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


def planned(config: dict, num_gpus: int, gpu: str, **settings) -> PlannedRun:
    return PlannedRun(
        config=load_config({"model": "m", "rollout": {"group_size": 4}, **settings}),
        shape=ModelShape.of_config(config),
        lengths=Lengths(median=40, p90=120, max=200),
        gpu=GPUS[gpu],
        gpu_name=gpu,
        num_gpus=num_gpus,
    )
