"""The adapters of an engine: unmerged ones, chosen per row, or one merged into the weights.

Unmerged adapters are computed beside a matrix product. All adapters of a product lie side by side:
A x is computed for all of them, multiplied by zero for those that a row does not use, and
multiplied by all B at once. So shapes do not depend on the adapters that the rows use, and CUDA
graphs and compiled layers stay valid.

Promise: only the adapter that a row chose changes the row. Unmerged adapters leave the model's own
weights as they are. A new version is laid out while decoding continues, in copies of the live
tensors, so a commit only copies.

A staging thread may call prepare() and prepare_gains(), which never write to live tensors. The
engine's thread calls everything else.

T = rows of a pass, I and O = input and output size of a product, S = adapters, K = sum of their
ranks, N = layers that share a product (such as query, key and value), E = experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import ConfigError, TaskError
from millrace.inference.embedded.decode.fused_linear import add_side, frozen, fused_slice_of
from millrace.inference.embedded.fp8 import FP8
from millrace.models.attention.recurrent import mixers_of
from millrace.models.lora.factors import (
    Adapter,
    add_update,
    aligned,
    factors_of,
    gain,
    grouped,
    scale_of,
)
from millrace.models.lora.folders import check_resident, read_checkpoint
from millrace.weights.packing import copy_all

BASE = "base"  # name of the model without an adapter, if the policy is an adapter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterSlot:
    number: int
    columns: slice  # of K
    adapter: Adapter


@dataclass(eq=False)
class AdapterChoice:
    """The adapter of each row of a pass; shared by all layers. Set before every pass."""

    slots: Tensor  # [T] int64; S = none
    mask: Tensor  # [T, K], of the model's dtype; 1 in the columns of the row's adapter, 0 elsewhere


@dataclass(kw_only=True, eq=False)
class AdaptedProduct:
    """Everything that adapters add to a matrix product. Its tensors are no weights of the model."""

    choice: AdapterChoice
    layers: dict[str, slice]  # the adapted layers that it computes, and their rows of O
    num_columns: int  # K
    a: Tensor  # [N K, I]
    b: Tensor  # [O, N K]; zero where row and column belong to different layers
    gains: Tensor | None  # [S + 1, O] float32, the last for no adapter; None = no DoRA

    def add(self, output: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product's output [..., T, O] for x [..., T, I], with each row's adapter added."""
        mask = self.choice.mask
        assert x.shape[-2] == mask.shape[0], "an adapted layer sees every row of a pass, once"
        inner = F.linear(x, self.a)
        inner = (inner.unflatten(-1, (-1, mask.shape[1])) * mask[:, None]).flatten(-2)
        output = output + F.linear(inner, self.b)
        if self.gains is None:
            return output
        gain = self.gains[self.choice.slots]
        if bias is None:
            return (output * gain).to(output.dtype)
        return ((output - bias) * gain + bias).to(output.dtype)

    def places(self, slot: AdapterSlot) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The name of each layer that has this adapter, and where its A and B belong."""
        for layer, rows, columns in self._layers_of(slot):
            yield layer, self.a[columns], self.b[rows, columns]

    def write_gains(
        self, slot: AdapterSlot, tensors: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]
    ) -> None:
        """Compute the gains of an adapter, whose A and B are laid out already."""
        if not slot.adapter.is_dora:
            return
        assert self.gains is not None
        for layer, rows, columns in self._layers_of(slot):
            weight = weights[f"{layer}.weight"].to(self.a.device, torch.float32)
            *_, magnitude = factors_of(tensors, layer, dora=True)
            updated = torch.addmm(weight, self.b[rows, columns].float(), self.a[columns].float())
            self.gains[slot.number, rows] = gain(updated, magnitude.to(self.gains))

    def _layers_of(self, slot: AdapterSlot) -> Iterator[tuple[str, slice, slice]]:
        """Name, rows and columns of each layer that has this adapter."""
        for index, (layer, rows) in enumerate(self.layers.items()):
            if layer in slot.adapter.layers:
                offset = index * self.num_columns
                yield layer, rows, slice(offset + slot.columns.start, offset + slot.columns.stop)


@dataclass(kw_only=True, eq=False)
class AdaptedExperts:
    """Everything that adapters add to a grouped product of experts."""

    choice: AdapterChoice
    layer: str  # the name of the weight
    a: Tensor  # [E, K, I]; K is rounded up to what grouped products need
    b: Tensor  # [E, O, K]

    def add(self, output: Tensor, x: Tensor, *, offsets: Tensor, tokens: Tensor) -> Tensor:
        inner = grouped(x, self.a, offsets)
        mask = self.choice.mask[tokens]
        inner = inner * F.pad(mask, (0, inner.shape[1] - mask.shape[1]))
        return output + grouped(inner, self.b, offsets)

    def places(self, slot: AdapterSlot) -> Iterator[tuple[str, Tensor, Tensor]]:
        if self.layer in slot.adapter.layers:
            yield self.layer, self.a[:, slot.columns], self.b[:, :, slot.columns]


def tensors_of(product: AdaptedProduct | AdaptedExperts) -> dict[str, Tensor]:
    return {key: value for key, value in vars(product).items() if isinstance(value, Tensor)}


def _add_products(
    model: PreTrainedModel, slots: Sequence[AdapterSlot], choice: AdapterChoice
) -> list[AdaptedProduct | AdaptedExperts]:
    """Give all products that some adapter changes room for all adapters."""
    num_columns = slots[-1].columns.stop

    def room(*shape: int) -> Tensor:
        return frozen(torch.zeros(*shape, dtype=model.dtype, device=model.device))

    owners: dict[int, tuple[Any, dict[str, slice]]] = {}
    products: list[AdaptedProduct | AdaptedExperts] = []
    shapes = {layer: shape for slot in slots for layer, shape in slot.adapter.layers.items()}
    for layer, (*experts, num_out, num_in) in shapes.items():
        if not experts:
            owner, start, stop = fused_slice_of(model.get_submodule(layer))
            _, layers = owners.setdefault(id(owner), (owner, {}))
            layers[layer] = slice(start, stop)
            continue
        columns = aligned(num_columns)
        a, b = room(*experts, columns, num_in), room(*experts, num_out, columns)
        products.append(AdaptedExperts(choice=choice, layer=layer, a=a, b=b))
        module, _, weight = layer.rpartition(".")
        add_update(model.get_submodule(module), weight, products[-1])
    has_gains = any(slot.adapter.is_dora for slot in slots)
    for owner, layers in owners.values():
        num_out, num_in = owner.weight.shape
        width = len(layers) * num_columns
        gains = frozen(torch.ones(len(slots) + 1, num_out, device=model.device))
        owner.side = AdaptedProduct(
            choice=choice,
            layers=layers,
            num_columns=num_columns,
            a=room(width, num_in),
            b=room(num_out, width),
            gains=gains if has_gains else None,
        )
        products.append(owner.side)
        if isinstance(owner, nn.Linear):
            # One function for all layers: torch.compile would build a program for each closure.
            owner.register_forward_hook(add_side)
    return products


class AdapterBank:
    def __init__(self, model: PreTrainedModel, adapters: Mapping[str | None, Adapter]) -> None:
        """`adapters` by name; None = the policy's, which updates bring, as they bring those of
        further policies, which are not loaded yet. The model's projections must have been fused
        before, if they ever are."""
        self._slots: dict[str | None, AdapterSlot] = {}
        num_columns = 0
        for number, (name, adapter) in enumerate(adapters.items()):
            columns = slice(num_columns, num_columns + adapter.rank)
            self._slots[name] = AdapterSlot(number=number, columns=columns, adapter=adapter)
            num_columns = columns.stop
        slots = list(self._slots.values())
        layers = [layer for slot in slots for layer in slot.adapter.layers]
        mixers = tuple(f"{name}." for name in mixers_of(model))
        if inside := [layer for layer in layers if layer.startswith(mixers)]:
            raise ConfigError(
                f"An adapter of {inside[0]!r}, a layer with a recurrent state, cannot be applied"
                " without merging; set lora.apply to 'merged', and leave engine.adapters empty."
            )
        ranks = torch.tensor([slot.adapter.rank for slot in slots])
        columns = torch.arange(len(ranks)).repeat_interleave(ranks).to(model.device)
        self._column_slots = columns  # [K]; the adapter of each column
        self._choice = AdapterChoice(columns[:0], columns[:0, None].to(model.dtype))
        self._weights = {
            name: model.get_parameter(name)
            for slot in slots
            for name in map(slot.adapter.weight_name, slot.adapter.layers)
        }
        in_fp8 = any(weight.dtype == FP8 for weight in self._weights.values())
        if in_fp8 and any(slot.adapter.is_dora for slot in slots):
            raise ConfigError(
                "A DoRA adapter that is not merged needs 16-bit weights; set lora.apply to"
                " 'merged', or leave engine.options.quantization out."
            )
        self._products = _add_products(model, slots, self._choice)
        for name, slot in self._slots.items():
            if name not in self.policies:
                self._write(self._products, slot, slot.adapter.tensors)

    @property
    def policy(self) -> Adapter | None:
        """The adapter that updates bring; None if they bring the model's own weights."""
        slot = self._slots.get(None)
        return None if slot is None else slot.adapter

    @property
    def policies(self) -> list[str | None]:
        """Names of the adapters that updates bring; None = the only or first policy."""
        return [name for name, slot in self._slots.items() if not slot.adapter.tensors]

    @property
    def names(self) -> list[str | None]:
        """The names in the order of their slots."""
        return [*self._slots]

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
        self._choice.slots = slots
        self._choice.mask = (slots[:, None] == self._column_slots).to(self._choice.mask.dtype)

    @torch.inference_mode()
    def load(self, name: str, folder: Path) -> None:
        """Replace a resident adapter by the LoRA adapter of a PEFT folder, of at most its rank.
        Layers that the new one lacks become those of the model. No running request uses `name`."""
        slot, saved = self._slots[name], check_resident(name, folder)
        given = read_checkpoint(folder)
        own = scale_of(saved["lora_alpha"], rank=saved["r"], rslora=bool(saved.get("use_rslora")))
        scale = own / slot.adapter.scale
        tensors = {key: torch.zeros(shape) for key, shape in slot.adapter.shapes().items()}
        for key, value in given.items():
            is_b, room = ".lora_B." in key, tensors.get(key)
            rank_dim = -1 if is_b else -2
            if room is None or saved["r"] > room.shape[rank_dim]:
                raise TaskError(f"Adapter {folder.name!r} does not fit into {name!r}: {key!r}.")
            room.narrow(rank_dim, 0, saved["r"]).copy_(value * scale if is_b else value)
        self._write(self._products, slot, tensors)

    def prepare(
        self, tensors: Mapping[str, Tensor], *, name: str | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Pairs of live and new tensor that make these the adapter of a policy. They are for the
        next commit: a clone holds the other adapters, too, so that whole tensors are copied."""
        pairs: list[tuple[Tensor, Tensor]] = []
        staged: list[AdaptedProduct | AdaptedExperts] = []
        for live in self._products:
            own = tensors_of(live)
            copies = {key: torch.empty_like(value) for key, value in own.items()}
            staged.append(replace(live, **copies))
            pairs += zip(own.values(), copies.values(), strict=True)
        copy_all([copy for _, copy in pairs], [own for own, _ in pairs])
        self._write(staged, self._slots[name], tensors)
        return pairs

    def _write(
        self,
        products: Sequence[AdaptedProduct | AdaptedExperts],
        slot: AdapterSlot,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Lay out an adapter with these tensors, in few launches: they delay the next version."""
        places = [place for product in products for place in product.places(slot)]
        factors = [factors_of(tensors, layer, dora=False) for layer, _, _ in places]
        bs = [b for _, b in factors]
        if slot.adapter.scale != 1.0:
            bs = torch._foreach_mul(bs, slot.adapter.scale)  # pyright: ignore[reportPrivateImportUsage]
        device = self._column_slots.device
        values = [a.to(device) for a, _ in factors] + [b.to(device) for b in bs]
        copy_all([a for _, a, _ in places] + [b for _, _, b in places], values)
        for product in products:
            if isinstance(product, AdaptedProduct):
                product.write_gains(slot, tensors, weights=self._weights)

    def prepare_gains(self, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of live and new gains of frozen adapters, for new weights of the model."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for live in self._products:
            if isinstance(live, AdaptedProduct) and live.gains is not None:
                gains = live.gains.clone()
                staged = replace(live, gains=gains)
                for slot in self._slots.values():
                    staged.write_gains(slot, slot.adapter.tensors, weights=weights)
                pairs.append((live.gains, gains))
        return pairs


class AdapterMerger:
    def __init__(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """`model`: the base model, before its layers are quantised and its projections fused."""
        self.adapter = adapter
        self._bases = {
            layer: model.get_parameter(adapter.weight_name(layer)).detach().clone()
            for layer in adapter.layers
        }

    def merged(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each weight that an adapter of these tensors changes."""
        for layer, base in self._bases.items():
            # Sums are float32 and are rounded once.
            value = self.adapter.merged(layer, base, tensors, dtype=base.dtype).to(base.dtype)
            yield self.adapter.weight_name(layer), value
