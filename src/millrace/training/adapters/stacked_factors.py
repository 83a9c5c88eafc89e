"""The tensors of the adapters of a pass, as the factors that its layers multiply with.

A model has hundreds of them. Each kernel of its own for each would cost a launch, which takes
longer than the kernel does, so the tensors of an adapter are handled end to end: all A, then all B.

R = rank; I, O = input and output size of a layer, E = its experts, N = adapters, P = numbers of all
tensors of an adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = Mapping[str, tuple[int, ...]]  # by the names of tensors


class FlatTensors(Mapping[str, Tensor]):
    """Tensors by name, which lie end to end in one tensor."""

    def __init__(self, flat: Tensor, sizes: Sizes) -> None:
        """`flat` [P]; `sizes`: in their order."""
        self.flat, self.sizes = flat, sizes

    @cached_property
    def _named(self) -> dict[str, Tensor]:
        return dict(zip(self.sizes, _split(self.flat, [*self.sizes.values()]), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def sizes_of(tensors: Mapping[str, Tensor]) -> Sizes:
    if isinstance(tensors, FlatTensors):
        return tensors.sizes
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def stacked_factors(
    adapters: Sequence[tuple[Mapping[str, Tensor], float]],
    a_sizes: Sizes,
    b_sizes: Sizes,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """The factors A and B of these sizes, which are [R, I] and [O, R], with E before them for
    experts: [N, ...] of linear layers and [E N, ...] of experts, by the names of tensors. An
    adapter has its tensors by name, and the scale of its B. Zeros fill up smaller ranks and missing
    tensors."""
    num_a, num_b = (
        sum(torch.Size(size).numel() for size in sizes.values()) for sizes in (a_sizes, b_sizes)
    )
    all_a: list[Tensor] = []
    all_b: list[Tensor] = []
    for tensors, scale in adapters:
        a, b = _flat(tensors, {**a_sizes, **b_sizes}, device).split([num_a, num_b])
        all_a.append(a.to(dtype))
        all_b.append((b * scale).to(dtype))
    return chain(_factors(a_sizes, all_a), _factors(b_sizes, all_b))


def _flat(tensors: Mapping[str, Tensor], sizes: Sizes, device: torch.device) -> Tensor:
    """Tensors end to end, padded to these sizes; differentiable."""
    if isinstance(tensors, FlatTensors) and [*tensors.sizes.items()] == [*sizes.items()]:
        return tensors.flat
    return torch.cat([_padded(tensors.get(n), size, device).flatten() for n, size in sizes.items()])


def _padded(factor: Tensor | None, size: Sequence[int], device: torch.device) -> Tensor:
    """A factor with zeros up to a larger rank; only zeros for an adapter without the layer."""
    if factor is None:
        return torch.zeros(*size, device=device)
    more = [large - own for large, own in zip(size, factor.shape, strict=True)]
    return F.pad(factor, (0, more[-1], 0, more[-2])) if any(more) else factor


def _factors(sizes: Sizes, flats: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    stacked = torch.stack([*flats]) if len(flats) > 1 else flats[0][None]
    for (name, size), part in zip(sizes.items(), _split(stacked, [*sizes.values()]), strict=True):
        yield name, part if len(size) == 2 else part.transpose(0, 1).flatten(0, 1)


def _split(flat: Tensor, sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Parts [..., *size] of a tensor [..., P]."""
    parts = flat.split([torch.Size(size).numel() for size in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]
