"""An adapter of an AdapterSet, with its gradient and its optimizer. Used by one thread."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from millrace.core.errors import TaskError
from millrace.models.lora.factors import Adapter
from millrace.training.adapters.requests import AdamSettings, AdapterShape
from millrace.training.adapters.stacked_factors import FlatTensors

# Engines compute the adapters of all tenants together, so that no product may overflow: infinity
# times the 0 of a row without the adapter is NaN.
MAX_WEIGHT = 16.0
WEIGHT_BYTES = 16  # with the gradient and both moments of the optimizer, in float32


class OwnedAdapter:
    """Its weights lie end to end in one tensor, and so do their gradient and the moments of the
    optimizer: a step on hundreds of tensors would take longer than a pass."""

    def __init__(
        self, shape: AdapterShape, layout: Adapter, parameters: Mapping[str, Tensor]
    ) -> None:
        """`parameters`: float32, by the names of layout.shapes()."""
        self.shape, self.layout = shape, layout
        # All A, then all B, as a pass needs them.
        self.sizes = dict(sorted(layout.shapes().items(), key=lambda size: ".lora_B." in size[0]))
        self.flat = nn.Parameter(self.flattened(parameters))
        self.optimizer = torch.optim.AdamW([self.flat])
        self.flat_gradient: Tensor | None = None  # sum over all passes since the last step
        self.num_steps = 0

    def flattened(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor for each weight, end to end."""
        return torch.cat([tensors[name].detach().flatten() for name in self.sizes])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Parts of a tensor with a number for each weight, by the names of the weights."""
        return {**FlatTensors(flat, self.sizes)}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Its weights by name. A change of them changes the adapter."""
        return self.named(self.flat.detach())

    @property
    def applied(self) -> tuple[Mapping[str, Tensor], float]:
        """The tensors and their scale, for AdaptedModel.applied()."""
        return FlatTensors(self.flat, self.sizes), self.layout.scale

    @property
    def gradient(self) -> dict[str, Tensor] | None:
        return None if self.flat_gradient is None else self.named(self.flat_gradient)

    @property
    def missing_bytes(self) -> int:
        """What it will allocate when it is trained."""
        held = 4 * (1 + (self.flat_gradient is not None) + 2 * bool(self.num_steps))
        return (WEIGHT_BYTES - held) * self.flat.numel()

    def step(self, adam: AdamSettings) -> float:
        """Apply the gradient, and begin the next one; returns its norm before clipping."""
        if self.flat_gradient is None:
            raise TaskError("There is no gradient to apply; call forward_backward first.")
        for group in self.optimizer.param_groups:
            group |= {
                "lr": adam.learning_rate,
                "betas": (adam.beta1, adam.beta2),
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            }
        flat = self.flat
        state = {key: value.clone() for key, value in self.optimizer.state[flat].items()}
        before, flat.grad = flat.detach().clone(), self.flat_gradient.clone()
        limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_([flat], limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        largest = flat.detach().abs().amax()
        if not largest <= MAX_WEIGHT:  # or NaN
            with torch.no_grad():
                flat.copy_(before)
            self.optimizer.state[flat] = state
            raise TaskError(
                f"The step would make a weight of the adapter {float(largest):g}, above the limit"
                f" of {MAX_WEIGHT:g}; it was not made. Lower learning_rate, or raise eps."
            )
        self.flat_gradient = None
        self.num_steps += 1
        return float(norm)
