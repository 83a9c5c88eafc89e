"""Llama 4: experts as grouped products, and attention that knows the positions of its rows.

The code of transformers multiplies every token by every expert, and most tokens by 0 before. Here
the block of a mixture calls its experts as other architectures do, with the indices and weights of
a token's experts. So engines can record routes and the trainer can replay them.

It tells chunks of the context to the attention mask alone, and scales queries of layers without
rotary embeddings by their place in the batch. A pass of Millrace is one flat batch without a mask.
So layers give the attention functions of Millrace the size of their chunks, or the scales.

Promise: a model computes what it computes for a sequence alone, and its parameters keep their
names.

T = tokens of a pass, D = hidden size, K = experts per token, E = experts of a layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import (
    Llama4Router,
    Llama4TextDecoderLayer,
    Llama4TextExperts,
    Llama4TextMoe,
)

from millrace.models.lora.factors import forward_with_lora

_OF_PASSES = ("layout", "millrace_paged")  # what attention functions of Millrace are given


class GroupedLlama4Router(Llama4Router):
    def forward(self, hidden_states: Tensor) -> Any:
        """[T, D] -> weights [T, K], scores [T, E] and indices [T, K]."""
        scores = F.linear(hidden_states, self.weight)
        values, indices = torch.topk(scores, self.top_k, dim=-1)
        return values.float().sigmoid().to(scores.dtype), scores, indices


class GroupedLlama4Experts(Llama4TextExperts):
    is_transposed = True
    scales_inputs = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, indices: Tensor, weights: Tensor
    ) -> Tensor:
        return forward_with_lora(self, hidden_states, indices, weights)

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class GroupedLlama4Moe(Llama4TextMoe):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> [T, D], and the router's scores [T, E]."""
        hidden = hidden_states.reshape(-1, self.hidden_dim)
        weights, scores, indices = self.router(hidden)
        return self.shared_expert(hidden) + self.experts(hidden, indices, weights), scores


class PositionedLlama4Layer(Llama4TextDecoderLayer):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, *, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if any(kwargs.get(name) is not None for name in _OF_PASSES):
            assert position_ids is not None
            kwargs |= self._of_attention(position_ids)
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)

    def _of_attention(self, positions: Tensor) -> dict[str, Any]:
        attention: Any = self.self_attn
        config = attention.config
        if config.layer_types[self.layer_idx] == "chunked_attention":
            return {"attention_chunk": config.attention_chunk_size}
        if attention.use_rope or not config.attn_temperature_tuning:
            return {}
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        return {"query_scales": torch.log1p(steps) * attention.attn_scale + 1.0}  # [1, T]


_OWN: dict[type[nn.Module], type[nn.Module]] = {
    Llama4Router: GroupedLlama4Router,
    Llama4TextExperts: GroupedLlama4Experts,
    Llama4TextMoe: GroupedLlama4Moe,
    Llama4TextDecoderLayer: PositionedLlama4Layer,
}


def use_own_classes(model: nn.Module) -> None:
    """Make the modules of a Llama 4 those of this file, before they are sharded or changed."""
    module: Any
    for module in model.modules():
        module.__class__ = _OWN.get(type(module), type(module))
        if hasattr(module, "attn_temperature_tuning"):
            vars(module)["attn_temperature_tuning"] = False  # by the place in the batch
