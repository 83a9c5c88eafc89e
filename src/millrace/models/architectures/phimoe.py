"""Phi-3.5-MoE: rotary embeddings whose factors stay on the device.

The code of transformers computes the factors on the host in every pass, and chooses their scale by
the longest sequence of the pass, for which it waits for the device. A CUDA graph can do neither.

Promise: a model computes what transformers computes for sequences of up to max_positions(), and its
parameters keep their names.
"""

from torch import Tensor, nn
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from millrace.models.directory import rope_tables


class StaticPhimoeRotaryEmbedding(PhimoeRotaryEmbedding):
    # transformers initialises the factors of modules that have "RotaryEmbedding" in their names.

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, T, D] of positions [1, T], in the dtype of x."""
        assert position_ids is not None
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device).float()
        angles = angles.repeat(1, 1, 2)
        (rope,) = rope_tables(self.config)
        scale = rope.get("short_mscale", self.attention_scaling)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def use_own_classes(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is PhimoeRotaryEmbedding:
            module.__class__ = StaticPhimoeRotaryEmbedding
