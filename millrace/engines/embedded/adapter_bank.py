"""The adapters an engine applies without merging them: that of the policy, and frozen ones.

Promise: a row is changed by the adapter it chose and no other. Adapters are written in place, and
the model's own weights stay as they are, so a swap of the policy's adapter is a copy of small
tensors. Products of equal shape share their storage for that: one copy reaches all layers.

Used by the engine's thread. S, K, N, I, O as in side_products; L = products of equal shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import TaskError
from millrace.engines.embedded.decode.layers import Joint, place_of
from millrace.engines.embedded.side_products import Choice, SideProduct, add_beside
from millrace.models.adapters import Adapter, Factors, factors_of, gain

BASE = "base"  # the model without an adapter, when the policy is one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Slot:
    number: int
    columns: slice  # of K
    adapter: Adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Product:
    owner: nn.Linear | Joint
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # rows of O, by layer


class AdapterBank:
    def __init__(self, model: PreTrainedModel, adapters: Mapping[str | None, Adapter]) -> None:
        """`adapters` by name, None = the policy's, which update() fills. The model's projections
        are as they stay."""
        self._slots: dict[str | None, _Slot] = {}
        num_columns = 0
        for number, (name, adapter) in enumerate(adapters.items()):
            columns = slice(num_columns, num_columns + adapter.rank)
            self._slots[name] = _Slot(number=number, columns=columns, adapter=adapter)
            num_columns = columns.stop
        ranks = torch.tensor([adapter.rank for adapter in adapters.values()])
        column_slots = torch.arange(len(ranks)).repeat_interleave(ranks).to(model.device)
        self._choice = Choice(column_slots, dtype=model.dtype)
        self._stacks = [
            _Stack(products, slots=list(self._slots.values()), choice=self._choice)
            for products in _by_shape(_products(model, adapters.values()))
        ]
        for name, slot in self._slots.items():
            if name is not None:
                self._write(slot, slot.adapter.tensors)

    @property
    def policy(self) -> Adapter | None:
        """The adapter that updates bring; None if they bring the model's own weights."""
        slot = self._slots.get(None)
        return None if slot is None else slot.adapter

    def slot_of(self, name: str | None) -> int:
        """What choose() calls this adapter; None = the policy."""
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
        """[T] the adapter of each row of the passes to come. Runs inside CUDA graphs."""
        self._choice.set(slots)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these the policy's adapter."""
        self._write(self._slots[None], tensors)

    def weights_changed(self) -> None:
        """The model's own weights are others now: what depends on them is computed anew."""
        for slot in self._slots.values():
            self._set_gains(slot)

    def _write(self, slot: _Slot, tensors: Mapping[str, Tensor]) -> None:
        for stack in self._stacks:
            stack.write(slot, tensors)
        self._set_gains(slot)

    def _set_gains(self, slot: _Slot) -> None:
        if slot.adapter.is_dora:
            for stack in self._stacks:
                stack.set_gains(slot)


def _products(model: PreTrainedModel, adapters: Iterable[Adapter]) -> list[_Product]:
    """The matrix products that some adapter changes."""
    products: dict[int, _Product] = {}
    names = dict.fromkeys(name for adapter in adapters for name in adapter.layers)
    for name in names:
        place = place_of(model.get_submodule(name))
        product = products.setdefault(id(place.product), _Product(owner=place.product))
        product.places[name] = (place.start, place.stop)
    return list(products.values())


def _by_shape(products: Iterable[_Product]) -> list[list[_Product]]:
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for product in products:
        shape = (*product.owner.weight.shape, *sorted(product.places.values()))
        groups.setdefault(shape, []).append(product)
    return list(groups.values())


class _Stack:
    """The adapters beside L products of equal shape."""

    def __init__(
        self, products: Sequence[_Product], *, slots: Sequence[_Slot], choice: Choice
    ) -> None:
        self._owners = [product.owner for product in products]
        by_row = [sorted(product.places.items(), key=lambda item: item[1]) for product in products]
        self._places = [place for _, place in by_row[0]]  # [N]
        self._names = list(
            zip(*([name for name, _ in row] for row in by_row), strict=True)
        )  # N x L
        self._num_columns = slots[-1].columns.stop
        weight = self._owners[0].weight
        num_out, num_in = weight.shape
        num, width = len(products), len(self._places) * self._num_columns
        self._a = weight.new_zeros(num, width, num_in)
        self._b = weight.new_zeros(num, num_out, width)
        self._gains = self._magnitudes = None
        if any(slot.adapter.is_dora for slot in slots):
            # The last row is that of no adapter.
            self._gains = torch.ones(num, len(slots) + 1, num_out, device=weight.device)
            self._magnitudes = torch.zeros_like(self._gains)
        for index, owner in enumerate(self._owners):
            gains = None if self._gains is None else self._gains[index]
            side = SideProduct(self._a[index], self._b[index], gains=gains, choice=choice)
            if isinstance(owner, Joint):
                owner.side = side
            else:
                add_beside(owner, side)

    def write(self, slot: _Slot, tensors: Mapping[str, Tensor]) -> None:
        for part, (start, stop) in enumerate(self._places):
            layers, factors = self._factors(slot, tensors, part=part)
            if not factors:
                continue
            columns = self._columns(slot, part=part)
            self._a[layers, columns] = self._stacked([f.a for f in factors])
            scale = slot.adapter.scale
            self._b[layers, start:stop, columns] = self._stacked([f.b for f in factors], scale)
            if slot.adapter.is_dora:
                assert self._magnitudes is not None
                stacked = torch.stack([f.magnitude for f in factors if f.magnitude is not None])
                self._magnitudes[layers, slot.number, start:stop] = stacked.to(self._magnitudes)

    def set_gains(self, slot: _Slot) -> None:
        """From what the product and the adapter weigh together."""
        assert self._gains is not None
        assert self._magnitudes is not None
        for part, (start, stop) in enumerate(self._places):
            columns = self._columns(slot, part=part)
            for index, name in enumerate(self._names[part]):
                if name in slot.adapter.layers:
                    a = self._a[index, columns].float()
                    b = self._b[index, start:stop, columns].float()
                    updated = torch.addmm(self._owners[index].weight[start:stop].float(), b, a)
                    where = index, slot.number, slice(start, stop)
                    self._gains[where] = gain(updated, self._magnitudes[where])

    def _factors(
        self, slot: _Slot, tensors: Mapping[str, Tensor], *, part: int
    ) -> tuple[slice | list[int], list[Factors]]:
        """What the adapter has for which of the L products."""
        adapter, names = slot.adapter, self._names[part]
        layers = [index for index, name in enumerate(names) if name in adapter.layers]
        factors = [factors_of(tensors, names[index], dora=adapter.is_dora) for index in layers]
        return slice(None) if len(layers) == len(names) else layers, factors

    def _columns(self, slot: _Slot, *, part: int) -> slice:
        offset = part * self._num_columns
        return slice(offset + slot.columns.start, offset + slot.columns.stop)

    def _stacked(self, tensors: Sequence[Tensor], scale: float = 1.0) -> Tensor:
        stacked = torch.stack(list(tensors)).to(self._a.device, torch.float32, non_blocking=True)
        return (stacked * scale if scale != 1.0 else stacked).to(self._a.dtype)
