"""The adapters an engine applies without merging them: that of the policy, and frozen ones.

Promise: a row is changed by the adapter it chose and no other. Adapters are written in place, and
the model's own weights stay as they are, so a swap of the policy's adapter is a copy of small
tensors. Products that are alike share their storage for that: one copy reaches all layers.

Used by the engine's thread. S, K, N, I, O as in side_products; L = products that are alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import TaskError
from millrace.engines.embedded.decode.layers import Joint, place_of
from millrace.engines.embedded.side_products import Choice, SideProduct, add_beside
from millrace.models.adapters import Adapter, gain, tensor_names

BASE = "base"  # the model without an adapter, when the policy is one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Slot:
    number: int
    columns: slice  # of K
    adapter: Adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """A layer, as a part of the product that computes it."""

    name: str
    start: int  # of its rows
    stop: int
    slots: tuple[int, ...]  # of the adapters it has


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Copy:
    """The same tensor of L layers, and where it goes."""

    names: list[str]
    target: Tensor  # [L, ...]
    scale: float = 1.0

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        stacked = torch.stack([tensors[name] for name in self.names])
        if self.scale != 1.0:
            stacked = stacked.float().mul_(self.scale)
        self.target.copy_(stacked, non_blocking=True)


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
        slots = list(self._slots.values())
        ranks = torch.tensor([slot.adapter.rank for slot in slots])
        column_slots = torch.arange(len(ranks)).repeat_interleave(ranks).to(model.device)
        self._choice = Choice(column_slots, dtype=model.dtype)
        self._stacks = [
            _Stack(alike, slots=slots, choice=self._choice)
            for alike in _alike(_products(model, slots))
        ]
        # Made once, because every name that is put together makes decoding wait.
        self._policy_copies = [] if self.policy is None else self._copies(self._slots[None])
        for name, slot in self._slots.items():
            if name is not None:
                self._write(slot, slot.adapter.tensors, copies=self._copies(slot))

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
        """[T] the adapter of each row of the pass to come. Runs inside CUDA graphs."""
        self._choice.set(slots)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these the policy's adapter."""
        self._write(self._slots[None], tensors, copies=self._policy_copies)

    def weights_changed(self) -> None:
        """The model's own weights are others now: what depends on them is computed anew."""
        for slot in self._slots.values():
            self._set_gains(slot)

    def _copies(self, slot: _Slot) -> list[_Copy]:
        return [copy for stack in self._stacks for copy in stack.copies(slot)]

    def _write(
        self, slot: _Slot, tensors: Mapping[str, Tensor], *, copies: Sequence[_Copy]
    ) -> None:
        for copy in copies:
            copy.run(tensors)
        self._set_gains(slot)

    def _set_gains(self, slot: _Slot) -> None:
        if slot.adapter.is_dora:
            for stack in self._stacks:
                stack.set_gains(slot)


class _Product(NamedTuple):
    owner: nn.Linear | Joint
    parts: list[_Part]  # those that have adapters, by row


def _products(model: PreTrainedModel, slots: Sequence[_Slot]) -> list[_Product]:
    """The matrix products that some adapter changes."""
    products: dict[int, _Product] = {}
    for name in dict.fromkeys(name for slot in slots for name in slot.adapter.layers):
        owner, start, stop = place_of(model.get_submodule(name))
        numbers = tuple(slot.number for slot in slots if name in slot.adapter.layers)
        product = products.setdefault(id(owner), _Product(owner, []))
        product.parts.append(_Part(name=name, start=start, stop=stop, slots=numbers))
    for product in products.values():
        product.parts.sort(key=lambda part: part.start)
    return list(products.values())


def _alike(products: Iterable[_Product]) -> list[list[_Product]]:
    """Those of equal shape whose parts have the same adapters."""
    groups: dict[tuple[object, ...], list[_Product]] = {}
    for product in products:
        parts = tuple((part.start, part.stop, part.slots) for part in product.parts)
        groups.setdefault((product.owner.weight.shape, parts), []).append(product)
    return list(groups.values())


class _Stack:
    """The adapters beside L products that are alike."""

    def __init__(
        self, products: Sequence[_Product], *, slots: Sequence[_Slot], choice: Choice
    ) -> None:
        self._products = products
        self._num_columns = slots[-1].columns.stop
        weight = products[0].owner.weight
        num_out, num_in = weight.shape
        num, width = len(products), len(products[0].parts) * self._num_columns
        self._a = weight.new_zeros(num, width, num_in)
        self._b = weight.new_zeros(num, num_out, width)
        self._gains = self._magnitudes = None
        if any(slot.adapter.is_dora for slot in slots):
            # The last row is that of no adapter.
            self._gains = torch.ones(num, len(slots) + 1, num_out, device=weight.device)
            self._magnitudes = torch.zeros_like(self._gains)
        for index, product in enumerate(products):
            gains = None if self._gains is None else self._gains[index]
            side = SideProduct(self._a[index], self._b[index], gains=gains, choice=choice)
            if isinstance(product.owner, Joint):
                product.owner.side = side
            else:
                add_beside(product.owner, side)

    def copies(self, slot: _Slot) -> list[_Copy]:
        """What brings an adapter here."""
        copies: list[_Copy] = []
        for index, part in self._parts_of(slot):
            rows, columns = slice(part.start, part.stop), self._columns(slot, part=index)
            layers = [product.parts[index].name for product in self._products]
            names = zip(*(tensor_names(n, dora=slot.adapter.is_dora) for n in layers), strict=True)
            a, b, *magnitudes = (list(same) for same in names)
            copies.append(_Copy(names=a, target=self._a[:, columns]))
            target = self._b[:, rows, columns]
            copies.append(_Copy(names=b, target=target, scale=slot.adapter.scale))
            for same in magnitudes:
                assert self._magnitudes is not None
                copies.append(_Copy(names=same, target=self._magnitudes[:, slot.number, rows]))
        return copies

    def set_gains(self, slot: _Slot) -> None:
        """From what each product and the adapter weigh together."""
        assert self._gains is not None
        assert self._magnitudes is not None
        for index, part in self._parts_of(slot):
            rows, columns = slice(part.start, part.stop), self._columns(slot, part=index)
            for layer, product in enumerate(self._products):
                a, b = self._a[layer, columns].float(), self._b[layer, rows, columns].float()
                updated = torch.addmm(product.owner.weight[rows].float(), b, a)
                where = layer, slot.number, rows
                self._gains[where] = gain(updated, self._magnitudes[where])

    def _parts_of(self, slot: _Slot) -> list[tuple[int, _Part]]:
        parts = enumerate(self._products[0].parts)
        return [(index, part) for index, part in parts if slot.number in part.slots]

    def _columns(self, slot: _Slot, *, part: int) -> slice:
        offset = part * self._num_columns
        return slice(offset + slot.columns.start, offset + slot.columns.stop)
