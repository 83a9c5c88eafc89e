"""Where the adapters of an engine lie: beside the products they change, and all in one place.

Promise: a new version of an adapter can be laid out in storage of its own, exactly as the storage
that decodes; one copy then brings it in, however many layers there are. Products that are alike
are stacked, so that laying out takes a few operations for all layers, too.

S, K, N, I, O as in side_products; L = products that are alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.layers import FusedLinear, fused_slice_of
from millrace.inference.embedded.lora.side_products import AdapterChoice, UnmergedLora, add_lora
from millrace.models.lora.factors import Adapter, gain, tensor_names

_ALIGN = 64  # values; more than any kernel wants of where a tensor begins


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterSlot:
    number: int
    columns: slice  # of K
    adapter: Adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ProductPart:
    """A layer, as a part of the product that computes it."""

    name: str
    start: int  # of its rows
    stop: int
    slots: tuple[int, ...]  # of the adapters it has


class _Product(NamedTuple):
    owner: nn.Linear | FusedLinear
    parts: list[_ProductPart]  # those that have adapters, by row


class Storage(NamedTuple):
    """Everything that adapters add to the products of a model."""

    factors: Tensor  # flat; every A and B, in the model's dtype
    gains: Tensor | None  # flat; every gain, float32; None = no adapter has magnitudes

    def clone(self) -> "Storage":
        gains = None if self.gains is None else self.gains.clone()
        return Storage(self.factors.clone(), gains)


class Region(NamedTuple):
    """Where a tensor lies in a flat one."""

    start: int
    shape: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class Layout:
    """Regions of a flat tensor, side by side."""

    def __init__(self) -> None:
        self.num_values = 0

    def add(self, *shape: int) -> Region:
        region = Region(self.num_values, shape)
        self.num_values += -(-math.prod(shape) // _ALIGN) * _ALIGN
        return region


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterSlice:
    """The same tensor of L layers, and where it goes."""

    names: list[str]
    region: Region  # [L, ...] of the factors
    within: tuple[slice, ...]
    scale: float = 1.0

    def write(self, tensors: Mapping[str, Tensor], *, into: Storage) -> None:
        stacked = torch.stack([tensors[name] for name in self.names])
        if self.scale != 1.0:
            stacked = stacked.float().mul_(self.scale)
        self.region.of(into.factors)[self.within].copy_(stacked, non_blocking=True)


class Stack:
    """The adapters beside L products that are alike."""

    def __init__(
        self,
        products: Sequence[_Product],
        *,
        slots: Sequence[AdapterSlot],
        factors: Layout,
        gains: Layout,
    ) -> None:
        """Takes regions of the `factors` and, if some adapter has magnitudes, of the `gains`."""
        self._products = products
        self._num_columns = slots[-1].columns.stop
        num_out, num_in = products[0].owner.weight.shape
        num, width = len(products), len(products[0].parts) * self._num_columns
        self._a = factors.add(num, width, num_in)  # [L, N K, I]
        self._b = factors.add(num, num_out, width)  # [L, O, N K]
        self._gains = None
        if any(slot.adapter.is_dora for slot in slots):
            # [L, S + 1, O]; the last row is that of no adapter.
            self._gains = gains.add(num, len(slots) + 1, num_out)

    def attach(self, storage: Storage, *, choice: AdapterChoice) -> None:
        """From now on the products add what lies there."""
        a, b, gains = self._a.of(storage.factors), self._b.of(storage.factors), None
        if self._gains is not None:
            assert storage.gains is not None
            gains = self._gains.of(storage.gains)
        for index, product in enumerate(self._products):
            own = None if gains is None else gains[index]
            side = UnmergedLora(a[index], b[index], gains=own, choice=choice)
            if isinstance(product.owner, FusedLinear):
                product.owner.side = side
            else:
                add_lora(product.owner, side)

    def pieces(self, slot: AdapterSlot) -> list[AdapterSlice]:
        """What brings an adapter's A and B here."""
        pieces: list[AdapterSlice] = []
        everywhere = slice(None)
        for index, part in self._parts_of(slot):
            rows, columns = slice(part.start, part.stop), self._columns(slot, part=index)
            layers = [product.parts[index].name for product in self._products]
            names = (tensor_names(name, dora=False) for name in layers)
            a, b = (list(same) for same in zip(*names, strict=True))
            pieces.append(AdapterSlice(names=a, region=self._a, within=(everywhere, columns)))
            within, scale = (everywhere, rows, columns), slot.adapter.scale
            pieces.append(AdapterSlice(names=b, region=self._b, within=within, scale=scale))
        return pieces

    def write_gains(
        self,
        slot: AdapterSlot,
        tensors: Mapping[str, Tensor],
        *,
        weights: Mapping[str, Tensor],
        into: Storage,
    ) -> None:
        """Those of an adapter with these `tensors`, whose A and B are there already, on a model
        with these `weights`; none if it has no magnitudes."""
        if not slot.adapter.is_dora:
            return
        assert self._gains is not None
        assert into.gains is not None
        a, b = self._a.of(into.factors), self._b.of(into.factors)
        gains = self._gains.of(into.gains)
        for index, part in self._parts_of(slot):
            rows, columns = slice(part.start, part.stop), self._columns(slot, part=index)
            for layer, product in enumerate(self._products):
                name = product.parts[index].name
                weight = weights[f"{name}.weight"].to(a.device, torch.float32)
                magnitude = tensors[tensor_names(name, dora=True)[-1]]
                updated = torch.addmm(
                    weight, b[layer, rows, columns].float(), a[layer, columns].float()
                )
                gains[layer, slot.number, rows] = gain(updated, magnitude.to(gains))

    def _parts_of(self, slot: AdapterSlot) -> list[tuple[int, _ProductPart]]:
        parts = enumerate(self._products[0].parts)
        return [(index, part) for index, part in parts if slot.number in part.slots]

    def _columns(self, slot: AdapterSlot, *, part: int) -> slice:
        offset = part * self._num_columns
        return slice(offset + slot.columns.start, offset + slot.columns.stop)


def build_stacks(
    model: PreTrainedModel, slots: Sequence[AdapterSlot], *, factors: Layout, gains: Layout
) -> list[Stack]:
    """For all products that some adapter changes."""
    return [
        Stack(alike, slots=slots, factors=factors, gains=gains)
        for alike in _group_by_shape(_products(model, slots))
    ]


def _products(model: PreTrainedModel, slots: Sequence[AdapterSlot]) -> list[_Product]:
    products: dict[int, _Product] = {}
    for name in dict.fromkeys(name for slot in slots for name in slot.adapter.layers):
        owner, start, stop = fused_slice_of(model.get_submodule(name))
        numbers = tuple(slot.number for slot in slots if name in slot.adapter.layers)
        product = products.setdefault(id(owner), _Product(owner, []))
        product.parts.append(_ProductPart(name=name, start=start, stop=stop, slots=numbers))
    for product in products.values():
        product.parts.sort(key=lambda part: part.start)
    return list(products.values())


def _group_by_shape(products: Iterable[_Product]) -> list[list[_Product]]:
    """Those of equal shape whose parts have the same adapters."""
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for product in products:
        parts = tuple((part.start, part.stop, part.slots) for part in product.parts)
        groups.setdefault((product.owner.weight.shape, parts), []).append(product)
    return list(groups.values())
