"""Any number of LoRA adapters over one frozen model, each with an optimizer of its own.

Promise: a call changes the adapter that it names and no other. A pass that fails leaves the
gradient of its adapter as it was. A step that would make a weight infinite, NaN or large enough to
overflow in an engine changes nothing. A saved adapter is a complete PEFT folder or none, and
training continues from it with the same numbers.

One thread calls all methods. L = tokens of a datum.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from millrace.core.errors import CheckpointError, TaskError
from millrace.models.devices import GIB, memory_of
from millrace.models.lora.factors import Adapter, scale_of
from millrace.models.lora.folders import read_checkpoint, write_folder
from millrace.training.adapters.adapted_model import AdaptedModel, initial_factors, to_tensor
from millrace.training.adapters.owned_adapter import WEIGHT_BYTES, OwnedAdapter
from millrace.training.adapters.requests import (
    ENDED,
    PASS_TOKENS,
    TARGETS,
    AdamSettings,
    AdapterPass,
    AdapterShape,
    PassResult,
    TrainingDatum,
)
from millrace.training.checkpoints.directory import read_run_state, write_checkpoint
from millrace.training.layers import checkpoint_layers, fuse_norms
from millrace.training.losses.summed import summed_loss

RESERVED_BYTES = GIB  # of the device, that no adapter takes: for activations of passes
ALPHA = 32.0  # B A is scaled by ALPHA / rank, as the Tinker API does
_OPTIMIZER_FILE = "optimizer.safetensors"
_GRADIENT_FILE = "gradient.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")

# Logprobs of each datum, the loss, and the gradient of the adapter afterwards, end to end.
_Computed = tuple[list[np.ndarray], float, Tensor | None]


class AdapterSet:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        path: str,
        max_context: int,
        free_bytes: Callable[[], int] | None = None,
        checkpoints: bool = False,
    ) -> None:
        """`model`: loaded from `path` with PACKED attention. Its weights never change.
        `free_bytes`: None = what is free on the device. `checkpoints`: if there is no room for the
        activations of a pass, layers are computed a second time for the backward pass."""
        self._model = AdaptedModel(model)
        fuse_norms(model)
        self._row_bytes = _activation_bytes(self._model)
        self._keeps_activations = False  # of the pass that is computed now
        if checkpoints:
            checkpoint_layers(model, keeps_all=lambda: self._keeps_activations)
        self._path = path
        self.max_context = max_context
        self._free_bytes = free_bytes or (lambda: memory_of(model.device)[0])
        self._num_ids = model.config.get_text_config().vocab_size
        self.owned: dict[str, OwnedAdapter] = {}  # by name; removing one frees it

    def create(self, name: str, shape: AdapterShape, *, seed: int | None) -> None:
        """Add an adapter, which changes nothing yet."""
        layout = self._layout(shape)
        self._check_memory(layout)
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        parameters = initial_factors(layout, generator=generator, device=self._model.device)
        self.owned[name] = OwnedAdapter(shape, layout, parameters)

    def _layout(self, shape: AdapterShape) -> Adapter:
        chosen = {
            layer: size
            for layer, size in self._model.layers.items()
            if (shape.attention if "attn" in layer or "attention" in layer else shape.mlp)
        }
        if not chosen:
            raise TaskError("The adapter has no layers; set train_attn or train_mlp to true.")
        scale = scale_of(ALPHA, rank=shape.rank, rslora=False)
        return Adapter(layers=chosen, rank=shape.rank, scale=scale)

    def _check_memory(self, layout: Adapter) -> None:
        """Refuse an adapter for which there is no room once all others have been trained."""
        needed = WEIGHT_BYTES * sum(map(math.prod, layout.shapes().values()))
        if needed > (room := self._room_bytes()):
            raise TaskError(
                f"The adapter needs {needed / GIB:.2f} GiB in training, and the device has room for"
                f" {max(room, 0) / GIB:.2f} GiB beside those of all tenants; lower the rank, or end"
                " the sessions of models that you no longer need."
            )

    def _room_bytes(self) -> int:
        """What is left of the device once all adapters have been trained."""
        missing = sum(each.missing_bytes for each in self.owned.values())
        return self._free_bytes() - RESERVED_BYTES - missing

    def compute(self, passes: Sequence[AdapterPass]) -> list[PassResult | Exception]:
        """The result of each pass, or why there is none. The gradient of a backward pass is added
        to that of its adapter. No two passes have the same adapter."""
        outcomes: dict[int, PassResult | Exception] = {}
        for i, one in enumerate(passes):
            try:
                self._check(one)
            except TaskError as error:
                outcomes[i] = error
        sound = [i for i in range(len(passes)) if i not in outcomes]
        for i, one in zip(sound, self._computed([passes[i] for i in sound]), strict=True):
            if isinstance(one, Exception):
                outcomes[i] = one
            else:
                logprobs, total, self.owned[passes[i].model_id].flat_gradient = one
                outcomes[i] = logprobs, total
        return [outcomes[i] for i in range(len(passes))]

    def _computed(self, passes: Sequence[AdapterPass]) -> list[_Computed | Exception]:
        """All passes together, or one by one if one of them fails: no tenant gets an error because
        of another one."""
        found: list[_Computed | Exception] = []
        try:
            found = [_unless_broken(one) for one in self._compute(passes)]
        except torch.OutOfMemoryError:
            found = [TaskError("The pass does not fit into memory; send fewer tokens at a time.")]
        except Exception as error:  # noqa: BLE001 - given to the caller
            found = [error]
        if len(passes) > 1 and any(isinstance(one, Exception) for one in found):
            found.clear()  # an error keeps the tensors of the failed pass
            for one in passes:
                found += self._computed([one])
        return found

    def _compute(self, passes: Sequence[AdapterPass]) -> list[_Computed]:
        """Logprobs, loss, and the gradient of the adapter with that of the pass added."""
        adapters = [self.owned[each.model_id] for each in passes]
        logprobs: list[list[np.ndarray]] = [[] for _ in passes]
        totals = [0.0 for _ in passes]
        gradients = [adapter.flat_gradient for adapter in adapters]
        for pack in _packs(passes, max_adapters=self._model.max_adapters):
            rows = [sum(len(datum.tokens) for datum in data) for data in pack.values()]
            applied = [adapters[i].applied for i in pack]
            trained = [i for i in pack if passes[i].backward]
            self._keeps_activations = sum(rows) * self._row_bytes <= self._room_bytes()
            with torch.set_grad_enabled(bool(trained)), self._model.applied(applied, rows):
                flat = self._model.logprobs([datum for data in pack.values() for datum in data])
                sizes = [sum(d.inputs[TARGETS].size for d in data) for data in pack.values()]
                values = {
                    i: _loss(passes[i], pack[i], own)
                    for i, own in zip(pack, flat.split(sizes), strict=True)
                }
                if trained:
                    value = torch.stack([values[i] for i in trained]).sum()
                    new = torch.autograd.grad(
                        value, [adapters[i].flat for i in trained], materialize_grads=True
                    )
                    for i, own in zip(trained, new, strict=True):
                        # In a new tensor, because a later part of the pass may fail.
                        gradients[i] = own if (old := gradients[i]) is None else old + own
            for i, value in zip(values, torch.stack([*values.values()]).tolist(), strict=True):
                totals[i] += value
            targets = [(i, datum.inputs[TARGETS]) for i, data in pack.items() for datum in data]
            ends = np.cumsum([t.size for _, t in targets])
            parts = np.split(flat.detach().float().cpu().numpy(), ends[:-1])
            for (i, t), own in zip(targets, parts, strict=True):
                logprobs[i].append(own.reshape(t.shape))
        return [*zip(logprobs, totals, gradients, strict=True)]

    def step(self, name: str, adam: AdamSettings) -> dict[str, float]:
        """Apply the gradient of an adapter, and begin the next one."""
        return {"grad_norm": self._adapter(name).step(adam)}

    def save(
        self,
        name: str,
        folder: Path,
        *,
        optimizer: bool,
        about: dict[str, Any],
        gradient: bool = False,
    ) -> None:
        """Write an adapter as a PEFT folder, with the optimizer's state and the gradient or without
        them. `about` is returned by read_about()."""
        adapter = self._adapter(name)
        tensors = adapter.named(adapter.flat.detach().cpu())
        moments = {
            f"{tensor}.{key}": part
            for key in (_MOMENTS if adapter.num_steps and optimizer else ())
            for tensor, part in adapter.named(
                adapter.optimizer.state[adapter.flat][key].cpu()
            ).items()
        }
        flat = adapter.flat_gradient if gradient else None
        pending = {} if flat is None else adapter.named(flat.cpu())

        def write(unfinished: Path) -> None:
            write_folder(unfinished, tensors, layout=adapter.layout, alpha=ALPHA, path=self._path)
            if moments:
                save_file(moments, unfinished / _OPTIMIZER_FILE)
            if pending:
                save_file(pending, unfinished / _GRADIENT_FILE)

        about = {**about, "num_steps": adapter.num_steps, "shape": asdict(adapter.shape)}
        written = (*tensors.values(), *moments.values(), *pending.values())
        size = sum(t.numel() * 4 for t in written)
        write_checkpoint(folder, write=write, run_state=about, needed_bytes=size)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Continue an adapter from what save() wrote."""
        adapter, about = self._adapter(name), read_about(folder)
        saved = read_checkpoint(folder)
        shapes = {tensor: tuple(value.shape) for tensor, value in saved.items()}
        if shapes != adapter.layout.shapes():
            raise TaskError(
                "The saved adapter has other layers or another rank; create the model with"
                f" {about['shape']}, as it was trained."
            )
        file = folder / _OPTIMIZER_FILE
        moments = load_file(file) if optimizer and file.is_file() else {}
        flat, flattened = adapter.flat, adapter.flattened
        fresh = torch.optim.AdamW([flat])
        with torch.no_grad():
            flat.copy_(flattened(saved))
        if moments:
            fresh.state[flat] = {"step": torch.tensor(float(about["num_steps"]))} | {
                key: flattened({name: moments[f"{name}.{key}"] for name in saved}).to(flat)
                for key in _MOMENTS
            }
        adapter.optimizer, adapter.flat_gradient = fresh, None
        if (file := folder / _GRADIENT_FILE).is_file():
            adapter.flat_gradient = flattened(load_file(file)).to(flat)
        adapter.num_steps = about["num_steps"] if moments else 0

    def write_blank(self, folder: Path, *, rank: int) -> None:
        """Write an adapter of this rank that adapts every layer and changes nothing."""
        layout = Adapter(layers=self._model.layers, rank=rank, scale=1.0)
        dtype = self._model.dtype
        tensors = {name: torch.zeros(size, dtype=dtype) for name, size in layout.shapes().items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, tensors, layout=layout, alpha=rank, path=self._path)

    def prompt_logprobs(self, tokens: np.ndarray, folder: Path | None) -> np.ndarray:
        """Logprobs [L] of tokens [L], with a saved adapter or without one. The first is NaN."""
        if len(tokens) == 1:
            return np.full(1, np.nan, np.float32)
        inputs = {TARGETS: tokens[1:].astype(np.int64)}
        datum = TrainingDatum(tokens=tokens[:-1].astype(np.int64), inputs=inputs)
        self._check_datum(datum, ())
        saved, scale = {}, 1.0
        if folder is not None:
            device, rank = self._model.device, read_about(folder)["shape"]["rank"]
            saved = {name: t.to(device) for name, t in read_checkpoint(folder).items()}
            scale = scale_of(ALPHA, rank=rank, rslora=False)
        with torch.no_grad(), self._model.applied([(saved, scale)], [len(datum.tokens)]):
            scored = self._model.logprobs([datum]).float().cpu().numpy()
        return np.append(np.float32(np.nan), scored)

    def _adapter(self, name: str) -> OwnedAdapter:
        if name not in self.owned:
            raise TaskError(ENDED)
        return self.owned[name]

    def _check(self, one: AdapterPass) -> None:
        self._adapter(one.model_id)
        _, inputs, _ = summed_loss(one.loss, one.settings)
        for datum in one.data:
            self._check_datum(datum, inputs)

    def _check_datum(self, datum: TrainingDatum, inputs: Sequence[str]) -> None:
        """Raise TaskError, because a wrong index on a GPU would end the process."""
        if not 0 < len(datum.tokens) <= self.max_context:
            raise TaskError(
                f"A datum has {len(datum.tokens)} tokens, but 1 to {self.max_context} are allowed."
            )
        for name in (TARGETS, *inputs):
            if name not in datum.inputs:
                raise TaskError(f"A datum lacks the input {name!r} of its loss.")
            size = datum.inputs[TARGETS].shape
            if (
                datum.inputs[name].shape != size
                or size[:1] != (len(datum.tokens),)
                or not datum.inputs[name].size
            ):
                raise TaskError(
                    f"A datum of {len(datum.tokens)} tokens has {name!r} of the shape"
                    f" {datum.inputs[name].shape}; give a row for each token in every input."
                )
        for ids in (datum.tokens, datum.inputs[TARGETS]):
            if ids.dtype.kind != "i" or ((ids < 0) | (ids >= self._num_ids)).any():
                raise TaskError(f"A token is not an integer from 0 to {self._num_ids - 1}.")


def read_about(folder: Path) -> dict[str, Any]:
    """What save() was told about an adapter, its shape and its number of steps."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no saved adapter {folder.name!r}.")
    return read_run_state(folder)


def _activation_bytes(model: AdaptedModel) -> float:
    """Bytes that layers keep of a row for the backward pass, at most: several times the inputs and
    outputs of products. Unknown for experts, because a row has only some of them."""
    if any(len(size) == 3 for size in model.layers.values()):
        return math.inf
    return 4 * model.dtype.itemsize * sum(map(sum, model.layers.values()))


def _loss(one: AdapterPass, data: Sequence[TrainingDatum], logprobs: Tensor) -> Tensor:
    """The loss of data of a pass from the logprobs of all their targets."""
    function, names, limits = summed_loss(one.loss, one.settings)
    given = {
        name: to_tensor(np.concatenate([d.inputs[name].ravel() for d in data]), logprobs.device)
        for name in names
    }
    return function(logprobs, given, limits)


def _unless_broken(computed: _Computed) -> _Computed | TaskError:
    _, total, gradient = computed
    norm = 0.0 if gradient is None else torch.linalg.vector_norm(gradient)
    if np.isfinite(total + float(norm)):
        return computed
    return TaskError(f"The loss {total:g} or its gradient is not finite; it was dropped.")


def _packs(
    passes: Sequence[AdapterPass], *, max_adapters: int
) -> Iterator[dict[int, list[TrainingDatum]]]:
    """The data of each forward pass, by the number of their own pass."""
    pack: dict[int, list[TrainingDatum]] = {}
    room = PASS_TOKENS
    for number, one in enumerate(passes):
        for datum in one.data:
            is_full = number not in pack and len(pack) == max_adapters
            if pack and (is_full or datum.num_tokens > room):
                yield pack
                pack, room = {}, PASS_TOKENS
            pack.setdefault(number, []).append(datum)
            room -= datum.num_tokens
    if pack:
        yield pack
