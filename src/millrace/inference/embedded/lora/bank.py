"""The adapters an engine applies without merging them: that of the policy, and frozen ones.

Promise: a row is changed by the adapter it chose and no other. The model's own weights stay as they
are. A new version is laid out beside decoding, all of it: what is left is to copy the result over
the storage that decodes, one tensor, or two if some adapter has magnitudes.

prepare() and prepare_gains() may run in another thread than the rest, and never write to what
decodes; everything else is called by the engine's thread.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import TaskError
from millrace.inference.embedded.lora.side_products import AdapterChoice
from millrace.inference.embedded.lora.stacks import AdapterSlot, Layout, Storage, build_stacks
from millrace.models.lora.factors import Adapter, factors_of, merged

BASE = "base"  # the model without an adapter, when the policy is one


class AdapterBank:
    def __init__(self, model: PreTrainedModel, adapters: Mapping[str | None, Adapter]) -> None:
        """`adapters` by name, None = the policy's, which updates bring. The model's projections are
        as they stay."""
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
        # Names are put together once, lest every update do so.
        self._pieces = {
            slot.number: [piece for stack in self._stacks for piece in stack.pieces(slot)]
            for slot in slots
        }
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

    def prepare(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What to copy where to make these the policy's adapter: pairs of live and new tensor."""
        # With the frozen adapters, which are the same in all versions: so one copy does it.
        staged = self._live.clone()
        self._write(self._slots[None], tensors, into=staged)
        pairs = [(self._live.factors, staged.factors)]
        return pairs + _pair(self._live.gains, staged.gains)

    def prepare_gains(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Likewise, for frozen adapters on a model that gets these weights of its own."""
        if self._live.gains is None:
            return []
        staged = Storage(self._live.factors, self._live.gains.clone())
        for slot in self._slots.values():
            for stack in self._stacks:
                stack.write_gains(slot, slot.adapter.tensors, weights=weights, into=staged)
        return _pair(self._live.gains, staged.gains)

    def _write(self, slot: AdapterSlot, tensors: Mapping[str, Tensor], *, into: Storage) -> None:
        for piece in self._pieces[slot.number]:
            piece.write(tensors, into=into)
        for stack in self._stacks:
            stack.write_gains(slot, tensors, weights=self._weights, into=into)


def _pair(live: Tensor | None, new: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    return [] if live is None or new is None else [(live, new)]


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`model` is the base model, its projections not yet joined."""
        self.adapter = adapter
        self._bases = {
            name: model.get_submodule(name).get_parameter("weight").detach().clone()
            for name in adapter.layers
        }

    def prepare(
        self, tensors: Mapping[str, Tensor], *, live: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """The `live` weights that an adapter with these tensors changes, each with its new value;
        they are not written to."""
        is_dora, scale = self.adapter.is_dora, self.adapter.scale
        pairs: list[tuple[Tensor, Tensor]] = []
        for layer, base in self._bases.items():
            factors = factors_of(tensors, layer, dora=is_dora)
            factors = factors.to(base.device, torch.float32)
            value = merged(base, factors, scale=scale).to(base.dtype)
            pairs.append((live[f"{layer}.weight"], value))
        return pairs
