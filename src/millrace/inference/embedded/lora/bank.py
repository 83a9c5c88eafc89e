"""The adapters of an engine: unmerged ones, chosen per row, or one merged into the weights.

Promise: only the adapter that a row chose changes the row. Unmerged adapters leave the model's own
weights as they are. A new version is laid out while decoding continues, in storage like the live
one: all factors are in one flat tensor, and all DoRA gains in another. So a commit copies one or
two tensors, for any number of layers. Products of equal shape are stacked, so that laying out takes
a few operations for all layers, too.

A staging thread may call prepare() and prepare_gains(), which never write to live tensors. The
engine's thread calls everything else.

S, K, N, I, O as in side_products; L = products of equal shape.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import TaskError
from millrace.inference.embedded.decode.layers import FusedLinear, fused_slice_of
from millrace.inference.embedded.lora.side_products import AdapterChoice, UnmergedLora, add_lora
from millrace.models.lora.factors import Adapter, factors_of, gain, merged, tensor_names

BASE = "base"  # name of the model without an adapter, if the policy is an adapter
_ALIGN = 64  # values; at least what any kernel requires of the start of a tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterSlot:
    number: int
    columns: slice  # of K
    adapter: Adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ProductPart:
    """A layer with adapters: rows start..stop of the product that computes it."""

    name: str
    tensors: tuple[str, ...]  # names of A, B and the magnitude
    start: int
    stop: int
    slots: tuple[int, ...]  # of its adapters


class _Product(NamedTuple):
    owner: nn.Linear | FusedLinear
    parts: list[_ProductPart]  # in the order of their rows


class Storage(NamedTuple):
    """Flat tensors with everything that adapters add to the products of a model."""

    factors: Tensor  # every A and B, in the model's dtype
    gains: Tensor | None  # every DoRA gain, float32; None = no adapter has magnitudes

    def clone(self) -> "Storage":
        gains = None if self.gains is None else self.gains.clone()
        return Storage(self.factors.clone(), gains)


class Region(NamedTuple):
    """The place of a tensor in a flat one."""

    start: int
    shape: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class Layout:
    """Allocates regions of a flat tensor."""

    def __init__(self) -> None:
        self.num_values = 0

    def add(self, *shape: int) -> Region:
        region = Region(self.num_values, shape)
        self.num_values += -(-math.prod(shape) // _ALIGN) * _ALIGN
        return region


class Stack:
    """The adapters of L products of equal shape."""

    def __init__(
        self,
        products: Sequence[_Product],
        *,
        slots: Sequence[AdapterSlot],
        factors: Layout,
        gains: Layout,
    ) -> None:
        """Allocates regions of `factors` and, if some adapter has magnitudes, of `gains`."""
        self._products = products
        self._num_columns = slots[-1].columns.stop
        num_out, num_in = products[0].owner.weight.shape
        num, width = len(products), len(products[0].parts) * self._num_columns
        self._a = factors.add(num, width, num_in)  # [L, N K, I]
        self._b = factors.add(num, num_out, width)  # [L, O, N K]
        self._gains = None
        if any(slot.adapter.is_dora for slot in slots):
            # [L, S + 1, O]; the last row is for rows without an adapter.
            self._gains = gains.add(num, len(slots) + 1, num_out)

    def attach(self, storage: Storage, *, choice: AdapterChoice) -> None:
        """From now on, the products add the adapters in this storage."""
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

    def write(
        self,
        slot: AdapterSlot,
        tensors: Mapping[str, Tensor],
        *,
        weights: Mapping[str, Tensor],
        into: Storage,
    ) -> None:
        """Lay out an adapter with these `tensors`, for a model with these `weights`."""
        a, b = self._a.of(into.factors), self._b.of(into.factors)
        for index, rows, columns in self._parts_of(slot):
            names = [product.parts[index].tensors for product in self._products]
            a[:, columns].copy_(
                torch.stack([tensors[name] for name, _, _ in names]), non_blocking=True
            )
            scaled = torch.stack([tensors[name] for _, name, _ in names])
            if slot.adapter.scale != 1.0:
                scaled = scaled.float().mul_(slot.adapter.scale)
            b[:, rows, columns].copy_(scaled, non_blocking=True)
        self.write_gains(slot, tensors, weights=weights, into=into)

    def write_gains(
        self,
        slot: AdapterSlot,
        tensors: Mapping[str, Tensor],
        *,
        weights: Mapping[str, Tensor],
        into: Storage,
    ) -> None:
        """Compute the gains of an adapter with these `tensors` on a model with these `weights`. Its
        A and B are in the storage already."""
        if not slot.adapter.is_dora:
            return
        assert self._gains is not None
        assert into.gains is not None
        a, b = self._a.of(into.factors), self._b.of(into.factors)
        gains = self._gains.of(into.gains)
        for index, rows, columns in self._parts_of(slot):
            for layer, product in enumerate(self._products):
                part = product.parts[index]
                weight = weights[f"{part.name}.weight"].to(a.device, torch.float32)
                magnitude = tensors[part.tensors[-1]]
                updated = torch.addmm(
                    weight, b[layer, rows, columns].float(), a[layer, columns].float()
                )
                gains[layer, slot.number, rows] = gain(updated, magnitude.to(gains))

    def _parts_of(self, slot: AdapterSlot) -> Iterator[tuple[int, slice, slice]]:
        """Index, rows and columns of each part that has this adapter."""
        for index, part in enumerate(self._products[0].parts):
            if slot.number in part.slots:
                offset = index * self._num_columns
                columns = slice(offset + slot.columns.start, offset + slot.columns.stop)
                yield index, slice(part.start, part.stop), columns


def build_stacks(
    model: PreTrainedModel, slots: Sequence[AdapterSlot], *, factors: Layout, gains: Layout
) -> list[Stack]:
    """Stacks of all products that some adapter changes."""
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for product in _products(model, slots):
        parts = tuple((part.start, part.stop, part.slots) for part in product.parts)
        groups.setdefault((product.owner.weight.shape, parts), []).append(product)
    return [
        Stack(products, slots=slots, factors=factors, gains=gains) for products in groups.values()
    ]


def _products(model: PreTrainedModel, slots: Sequence[AdapterSlot]) -> list[_Product]:
    products: dict[int, _Product] = {}
    for name in dict.fromkeys(name for slot in slots for name in slot.adapter.layers):
        owner, start, stop = fused_slice_of(model.get_submodule(name))
        numbers = tuple(slot.number for slot in slots if name in slot.adapter.layers)
        product = products.setdefault(id(owner), _Product(owner, []))
        tensors = tuple(tensor_names(name, dora=True))
        part = _ProductPart(name=name, tensors=tensors, start=start, stop=stop, slots=numbers)
        product.parts.append(part)
    for product in products.values():
        product.parts.sort(key=lambda part: part.start)
    return list(products.values())


class AdapterBank:
    def __init__(self, model: PreTrainedModel, adapters: Mapping[str | None, Adapter]) -> None:
        """`adapters` by name; None = the policy's, which updates bring. The model's projections
        must have been fused before, if they ever are."""
        self._slots: dict[str | None, AdapterSlot] = {}
        num_columns = 0
        for number, (name, adapter) in enumerate(adapters.items()):
            columns = slice(num_columns, num_columns + adapter.rank)
            self._slots[name] = AdapterSlot(number=number, columns=columns, adapter=adapter)
            num_columns = columns.stop
        slots = list(self._slots.values())
        ranks = torch.tensor([slot.adapter.rank for slot in slots])
        column_slots = torch.arange(len(ranks)).repeat_interleave(ranks).to(model.device)
        self._choice = AdapterChoice(column_slots, dtype=model.dtype)
        self._weights = {
            f"{layer}.weight": model.get_submodule(layer).get_parameter("weight")
            for slot in slots
            for layer in slot.adapter.layers
        }
        factors, gains = Layout(), Layout()
        self._stacks = build_stacks(model, slots, factors=factors, gains=gains)
        self._live = Storage(
            torch.zeros(factors.num_values, dtype=model.dtype, device=model.device),
            torch.ones(gains.num_values, device=model.device) if gains.num_values else None,
        )
        for name, slot in self._slots.items():
            if name is not None:
                self._write(slot, slot.adapter.tensors, into=self._live)
        for stack in self._stacks:
            stack.attach(self._live, choice=self._choice)

    @property
    def policy(self) -> Adapter | None:
        """The adapter that updates bring; None if they bring the model's own weights."""
        slot = self._slots.get(None)
        return None if slot is None else slot.adapter

    def slot_of(self, name: str | None) -> int:
        """The number of this adapter for choose(); None = the policy."""
        if name in self._slots:
            return self._slots[name].number
        if name == (BASE if None in self._slots else None):
            return len(self._slots)
        known = [name for name in self._slots if name is not None]
        known += [BASE] if None in self._slots else []
        raise TaskError(
            f"There is no adapter {name!r}; this engine has {', '.join(map(repr, known))}."
        )

    def choose(self, slots: Tensor) -> None:
        """Set the adapter of each row [T] of the next pass. Runs inside CUDA graphs."""
        self._choice.set(slots)

    def prepare(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of live and new tensor that make these the policy's adapter."""
        # A clone holds the frozen adapters, too, so that one copy is enough.
        staged = self._live.clone()
        self._write(self._slots[None], tensors, into=staged)
        pairs = [(self._live.factors, staged.factors)]
        return pairs + _pair(self._live.gains, staged.gains)

    def prepare_gains(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of live and new gains of frozen adapters, for new weights of the model."""
        if self._live.gains is None:
            return []
        staged = Storage(self._live.factors, self._live.gains.clone())
        for slot in self._slots.values():
            for stack in self._stacks:
                stack.write_gains(slot, slot.adapter.tensors, weights=weights, into=staged)
        return _pair(self._live.gains, staged.gains)

    def _write(self, slot: AdapterSlot, tensors: Mapping[str, Tensor], *, into: Storage) -> None:
        for stack in self._stacks:
            stack.write(slot, tensors, weights=self._weights, into=into)


def _pair(live: Tensor | None, new: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    return [] if live is None or new is None else [(live, new)]


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`model`: the base model, before its projections are fused."""
        self.adapter = adapter
        self._bases = {
            name: model.get_submodule(name).get_parameter("weight").detach().clone()
            for name in adapter.layers
        }

    def prepare(
        self, tensors: Mapping[str, Tensor], *, live: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of each `live` weight that an adapter with these tensors changes, and its new
        value."""
        is_dora, scale = self.adapter.is_dora, self.adapter.scale
        pairs: list[tuple[Tensor, Tensor]] = []
        for layer, base in self._bases.items():
            factors = factors_of(tensors, layer, dora=is_dora)
            factors = factors.to(base.device, torch.float32)
            value = merged(base, factors, scale=scale).to(base.dtype)
            pairs.append((live[f"{layer}.weight"], value))
        return pairs
