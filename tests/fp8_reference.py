"""Plain transformers models that round as engines in FP8 do, by code of their own."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from architectures import tiny_model
from torch import nn
from transformers import AttentionInterface


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row as 448 / max(row) times the nearest FP8 numbers."""
    scale = 448 / x.double().abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return ((x.double() * scale).float().to(torch.float8_e4m3fn).double() / scale).to(x.dtype)


def fp8_model(architecture: str = "qwen3", *, seed: int = 0, adapter: Any = None) -> Any:
    """A model that rounds weights, merged with the adapter's updates, and activations."""
    model: Any = tiny_model(architecture, seed=seed)
    for name, module in model.base_model.layers.named_modules():
        if type(module) is nn.Linear:
            weight = module.weight.data
            if adapter is not None and f"model.layers.{name}" in adapter:
                weight += adapter[f"model.layers.{name}"]
            module.weight.data = rounded(weight)
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    return model


def _rounded_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    kv = (rounded(key), rounded(value))
    output = F.scaled_dot_product_attention(
        query, *kv, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("rounded_kv", _rounded_attention)


def logits_with_rounded_kv(prompt: np.ndarray, completion: Any, model: Any) -> torch.Tensor:
    model.set_attn_implementation("rounded_kv")
    tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens])).long()
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float()
