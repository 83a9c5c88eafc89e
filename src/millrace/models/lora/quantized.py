"""The frozen matrices beneath an adapter, in NF4 (lora.quantization).

Promise: the trainer, which holds them in 4 bits, and engines, which hold the same values in their
own data type, quantize the same matrices: those of the linear layers of decoder layers. Embeddings,
the head, norms, biases, routers and layers with a recurrent state stay as they are.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.models.attention.recurrent import mixers_of
from millrace.models.lora.factors import expert_modules
from millrace.models.lora.nf4 import BLOCK, Nf4Linear, rounded
from millrace.models.sharding import decoder_layers, router_modules


def quantizable_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers whose matrices are quantized; raises ConfigError for a model that
    has none, or has experts."""
    remedy = "leave lora.quantization out"
    if experts := [*expert_modules(model)]:
        raise ConfigError(
            f"lora.quantization = 'nf4' does not support experts such as {experts[0]!r} of"
            f" {type(model).__name__}; {remedy}."
        )
    kept = {
        id(m)
        for part in [*router_modules(model), *mixers_of(model).values()]
        for m in part.modules()
    }
    inside = {id(m) for layer in decoder_layers(model) for m in layer.modules()} - kept
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in inside and not module.weight.numel() % BLOCK
    ]
    if not names:
        raise ConfigError(
            f"lora.quantization = 'nf4' finds no linear layers in the decoder layers of"
            f" {type(model).__name__}; {remedy}."
        )
    return names


def quantize_base(model: PreTrainedModel, *, device: torch.device) -> None:
    """Replace the layers of a model in memory of the host, and move it to the device, which never
    holds more than one of the matrices in full."""
    for name in quantizable_layers(model):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, Nf4Linear(linear, device=device))
    model.to(device)  # pyright: ignore[reportArgumentType] - a decorator hides its signature


@torch.no_grad()
def round_base(model: PreTrainedModel) -> None:
    """Give the matrices the values that quantize_base() gives them, in their data type."""
    for name in quantizable_layers(model):
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(rounded(weight))
