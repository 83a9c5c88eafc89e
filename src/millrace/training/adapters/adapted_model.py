"""A frozen model whose rows are changed by LoRA adapters, several in one pass.

Promise: only the adapter of a row changes the row, and gets a gradient from it. The rows of an
adapter are contiguous, and the factors of all adapters are multiplied group by group, so no row
meets the factors of another adapter.

One thread calls all methods. R = rank; I, O = input and output size of a layer, E = its experts;
N = adapters and T = tokens of a pass, K = targets per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.models.attention.layout import PackedLayout
from millrace.models.loading import hidden_states
from millrace.models.logprobs import chunked_distributions
from millrace.models.lora.factors import (
    Adapter,
    adaptable_layers,
    add_update,
    aligned,
    check_adaptable,
    expert_modules,
    grouped,
    tensor_names,
)
from millrace.training.adapters.requests import TARGETS, TrainingDatum
from millrace.training.adapters.stacked_factors import sizes_of, stacked_factors

_MAX_ADAPTERS = 16  # of one forward pass
_MAX_GROUPS = 1023  # of a grouped product on a GPU
_LOGPROB_CHUNK = 1024  # positions whose logits exist at one time


@dataclass(slots=True, eq=False)
class _ActiveAdapters:
    """The adapters of the rows of a pass."""

    # By layer: A [N, R, I] and scaled B [N, O, R]; of experts [E N, R, I] and [E N, O, R]. R and O
    # are rounded up to what grouped products need.
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ends: Tensor = field(default_factory=lambda: torch.zeros(1))  # [N] int32; of their rows
    num_rows: int = 0


class _AdaptedLayer:
    """Adds the factors of the adapters that compute now to the output of one layer: as a hook of a
    linear layer, or as an update of experts (models/lora/factors.py)."""

    def __init__(self, layer: str, active: _ActiveAdapters) -> None:
        self._layer, self._active = layer, active

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self._layer not in self._active.factors:
            return output
        a, b = self._active.factors[self._layer]
        given = args[0].to(a.dtype)
        if len(a) == 1:
            update = F.linear(F.linear(given, a.flatten(0, 1)), b.flatten(0, 1))
            return output + _first(update, output.shape[-1])
        ends, x = self._active.ends, given.flatten(0, -2)
        assert len(x) == self._active.num_rows, "an adapted layer sees every row of a pass, once"
        update = _first(grouped(grouped(x, a, ends), b, ends), output.shape[-1])
        return output + update.reshape(output.shape)

    def add(self, output: Tensor, x: Tensor, *, offsets: Tensor, tokens: Tensor) -> Tensor:
        if self._layer not in self._active.factors:
            return output
        a, b = self._active.factors[self._layer]
        ends = self._active.ends
        if len(ends) > 1:
            # The rows of an expert are in the order of their tokens, so in that of the adapters.
            rows = torch.arange(len(tokens), device=tokens.device, dtype=offsets.dtype)
            experts = torch.bucketize(rows, offsets, right=True)
            adapters = torch.bucketize(tokens.to(ends.dtype), ends, right=True)
            groups = experts * len(ends) + adapters
            numbers = torch.arange(len(a), device=groups.device, dtype=groups.dtype)
            offsets = torch.searchsorted(groups, numbers, right=True, out_int32=True)
        return output + _first(grouped(grouped(x, a, offsets), b, offsets), output.shape[-1])


def _first(update: Tensor, num_out: int) -> Tensor:
    """Without padded outputs. A slice of all of them would cost a copy in the backward pass."""
    return update if update.shape[-1] == num_out else update[..., :num_out]


class AdaptedModel:
    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> None:
        """`model`: loaded with PACKED attention. `dtype`: of products with factors, if not the
        model's."""
        self._model = model.requires_grad_(False)
        self.device, self.dtype = model.device, dtype or model.dtype
        self.layers = adaptable_layers(model)
        self._active = _ActiveAdapters()
        check_adaptable(expert_modules(model).values())
        num_experts = max((size[0] for size in self.layers.values() if len(size) == 3), default=1)
        self.max_adapters = max(1, min(_MAX_ADAPTERS, _MAX_GROUPS // num_experts))  # of a pass
        for layer, size in self.layers.items():
            adapted = _AdaptedLayer(layer, self._active)
            if len(size) == 2:
                model.get_submodule(layer).register_forward_hook(adapted)
            else:
                module, _, weight = layer.rpartition(".")
                add_update(model.get_submodule(module), weight, adapted)

    @contextmanager
    def applied(
        self, adapters: Sequence[tuple[Mapping[str, Tensor], float]], rows: Sequence[int]
    ) -> Iterator[None]:
        """Inside the context, each adapter changes its number of rows of a pass. An adapter has its
        tensors by name and a scale."""
        known = [sizes_of(tensors) for tensors, _ in adapters]
        a_sizes: dict[str, tuple[int, ...]] = {}  # of the factors of one adapter, by tensor
        b_sizes: dict[str, tuple[int, ...]] = {}
        for layer, (*experts, num_out, num_in) in self.layers.items():
            a, b = tensor_names(layer, dora=False)
            if ranks := [sizes[a][-2] for sizes in known if a in sizes]:
                rank = aligned(max(ranks))
                a_sizes[a] = (*experts, rank, num_in)
                # The gate of a shared expert has one output.
                b_sizes[b] = (*experts, aligned(num_out), rank)
        found: dict[str, Tensor] = {}
        if a_sizes:
            kind = {"dtype": self.dtype, "device": self.device}
            found = dict(stacked_factors(adapters, a_sizes, b_sizes, **kind))
        names = {layer: tensor_names(layer, dora=False) for layer in self.layers}
        self._active.factors = {
            layer: (found[a], found[b]) for layer, (a, b) in names.items() if a in found
        }
        self._active.num_rows = sum(rows)
        self._active.ends = to_tensor(np.cumsum(rows, dtype=np.int32), self.device)
        try:
            yield
        finally:
            self._active.factors = {}

    def logprobs(self, data: Sequence[TrainingDatum]) -> Tensor:
        """Logprobs of all targets of all data, in their order; differentiable."""
        device, lengths = self.device, [len(datum.tokens) for datum in data]
        tokens = np.concatenate([datum.tokens for datum in data])
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden = hidden_states(
            self._model,
            input_ids=to_tensor(tokens, device)[None],
            position_ids=to_tensor(positions, device)[None],
            layout=PackedLayout(lengths, device=device),
        )
        targets = [datum.inputs[TARGETS] for datum in data]
        counts = np.concatenate([np.full(len(t), t[0].size) for t in targets])
        if counts.max() > 1:  # a row for each of several targets of a token
            hidden = hidden.repeat_interleave(to_tensor(counts, device), dim=0)
        flat = to_tensor(np.concatenate([t.ravel() for t in targets]), device)
        logprobs, _, _ = chunked_distributions(
            self._model,
            hidden,
            flat,
            temperatures=torch.ones(len(flat), device=device),
            kept=None,
            chunk=_LOGPROB_CHUNK,
        )
        return logprobs


def initial_factors(
    layout: Adapter, *, generator: torch.Generator, device: torch.device
) -> dict[str, nn.Parameter]:
    """The tensors of a new adapter, by name. B is 0, so it changes nothing yet."""
    parameters: dict[str, nn.Parameter] = {}
    for tensor, size in layout.shapes().items():
        values = torch.zeros(size)
        if ".lora_A." in tensor:
            values.uniform_(-(size[-1] ** -0.5), size[-1] ** -0.5, generator=generator)
        parameters[tensor] = nn.Parameter(values.to(device))
    return parameters


def to_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)  # copies, because bodies of requests are read-only
