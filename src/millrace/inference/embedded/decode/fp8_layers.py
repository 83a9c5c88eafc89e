"""Matrix products of decoder layers in FP8: weights and activations.

A weight has one scale per output, and an activation one per token, which is found while the norm or
the activation function before the product is computed. On a GPU, FP8 tensor cores multiply. Other
devices multiply the same FP8 values in float32, which is the reference of the GPU's tests.

Promise: weights keep their names and shapes, so updates bring 16-bit weights as before. A row's
result depends on the values of no other row. Embeddings, the head, norms, routers and layers with a
recurrent state stay as they are.

T = rows, I and O = input and output size of a product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.core.errors import ConfigError
from millrace.inference.embedded.decode.attention import define_operator
from millrace.inference.embedded.fp8 import quantize_rows
from millrace.models.attention.recurrent import mixers_of
from millrace.models.lora.factors import expert_modules
from millrace.models.sharding import router_modules

_MULTIPLE = 16  # of both sizes of a matrix that FP8 tensor cores take
_CAPABILITY = (9, 0)  # of a GPU whose tensor cores take scales per row


class Fp8Matrix:
    """A weight [O, I] with the scales [O, 1] of its rows. It is no module, because the parameters
    of modules are weights that updates bring."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        # Parameters, because torch.compile treats their shapes as constant.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def multiply(self, x: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
        """[..., O] in this dtype, for x [..., I] in any."""
        values, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        output = torch.ops.millrace.fp8_product(values, scales, self.weight, self.scales)
        output = output.to(dtype).view(*x.shape[:-1], -1)
        return output if bias is None else output + bias


class Fp8Linear(nn.Module):
    """Takes the place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.matrix = Fp8Matrix(*quantize_rows(linear.weight.detach()))
        self.weight, self.bias = self.matrix.weight, linear.bias
        self.row_scales = self.matrix.scales.detach()  # a parameter would be a weight of the model
        self.side = None  # an AdaptedProduct

    def forward(self, x: Tensor) -> Tensor:
        output = self.matrix.multiply(x, self.bias, dtype=self.dtype)
        return output if self.side is None else self.side.add(output, x.to(self.dtype), self.bias)


def quantize_layers(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model's decoder layers, in place."""
    name, dtype = type(model).__name__, model.dtype
    remedy = "leave engine.options.quantization out"
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) < _CAPABILITY:
        raise ConfigError(
            "engine.options.quantization = 'fp8' needs a Hopper or newer GPU, such as an H100;"
            f" {remedy}."
        )
    if expert_modules(model):
        raise ConfigError(
            f"engine.options.quantization = 'fp8' does not support the experts of {name}; {remedy}."
        )
    num_replaced = 0
    kept = {
        id(m)
        for part in [*router_modules(model), *mixers_of(model).values()]
        for m in part.modules()
    }
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        for parent in list(layer.modules()):
            for name_in_parent, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and id(child) not in kept and _fits(child):
                    setattr(parent, name_in_parent, Fp8Linear(child))
                    num_replaced += 1
    if not num_replaced or model.dtype != dtype:
        raise ConfigError(
            f"engine.options.quantization = 'fp8' does not support {name}, whose decoder layers"
            f" have no linear layers with sizes that are multiples of {_MULTIPLE}; {remedy}."
        )
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of the 16-bit weights becomes room for the KV cache


def _fits(module: nn.Linear) -> bool:
    return type(module) is nn.Linear and not any(n % _MULTIPLE for n in module.weight.shape)


def _product_on_cuda(values: Tensor, scales: Tensor, weight: Tensor, row_scales: Tensor) -> Tensor:
    return torch.ops.aten._scaled_mm(
        values,
        weight.t(),
        scale_a=scales,
        scale_b=row_scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def plain_product(
    values: Tensor,  # [T, I] FP8
    scales: Tensor,  # [T, 1] float32
    weight: Tensor,  # [O, I] FP8
    row_scales: Tensor,  # [O, 1] float32
) -> Tensor:  # [T, O] float32; on a GPU bfloat16
    return F.linear(values.float(), weight.float()) * scales * row_scales.t()


define_operator(
    "fp8_product(Tensor values, Tensor scales, Tensor weight, Tensor row_scales) -> Tensor",
    cuda=_product_on_cuda,
    cpu=plain_product,
    shape=lambda values, _, weight, __: values.new_empty(
        len(values), len(weight), dtype=torch.bfloat16 if values.is_cuda else torch.float32
    ),
)
