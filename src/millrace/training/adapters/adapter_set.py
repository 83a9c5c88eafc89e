"""Any number of LoRA adapters over one frozen model, each with an optimizer of its own.

Promise: a call changes the adapter that it names and no other. A pass that fails leaves the
gradient of its adapter as it was, and an update that is not finite is not applied. A saved adapter
is a complete PEFT folder or none, and training continues from it with the same numbers.

One thread calls all methods. R = rank; I, O = input and output size of a layer, E = its experts;
T = tokens of a pass, L = tokens of a datum, K = targets per token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.core.errors import CheckpointError, TaskError
from millrace.models.attention.layout import PackedLayout
from millrace.models.loading import hidden_states
from millrace.models.logprobs import chunked_distributions
from millrace.models.lora.experts import (
    add_update,
    aligned,
    check_adaptable,
    expert_modules,
    grouped,
)
from millrace.models.lora.factors import Adapter, adaptable_layers, scale_of, tensor_names
from millrace.models.lora.folders import (
    NAME_PREFIX,
    SETTINGS_FILE,
    WEIGHTS_FILE,
    read_checkpoint,
    to_peft,
)
from millrace.training.adapters.requests import TARGETS, AdamSettings, AdapterShape, TrainingDatum
from millrace.training.checkpoints.directory import read_run_state, write_checkpoint
from millrace.training.layers import checkpoint_layers
from millrace.training.losses.summed import summed_loss

ALPHA = 32.0  # B A is scaled by ALPHA / rank, as the Tinker API does
_PASS_TOKENS = 8192  # of one forward pass, unless a single datum is longer
_LOGPROB_CHUNK = 1024  # positions whose logits exist at one time
_OPTIMIZER_FILE = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True, slots=True, eq=False)
class OwnedAdapter:
    shape: AdapterShape
    layout: Adapter
    parameters: dict[str, nn.Parameter]  # float32, by the names of layout.shapes()
    optimizer: torch.optim.AdamW
    gradient: dict[str, Tensor] | None = None  # sum over all passes since the last step
    num_steps: int = 0


class _AdaptedLayer:
    """Adds the factors of the adapter that computes now to the output of one layer: as a hook of a
    linear layer, or as an ExpertUpdate (models/lora/experts.py)."""

    def __init__(self, layer: str, active: "_ActiveAdapter") -> None:
        self._names = tensor_names(layer, dora=False)
        self._active = active

    def _factors(self, dtype: torch.dtype) -> list[Tensor]:
        tensors = self._active.tensors
        return [tensors[name].to(dtype) for name in self._names if name in tensors]

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not (factors := self._factors(args[0].dtype)):
            return output
        return output + self._active.scale * F.linear(F.linear(args[0], factors[0]), factors[1])

    def add(self, output: Tensor, x: Tensor, *, offsets: Tensor, tokens: Tensor) -> Tensor:
        if not (factors := self._factors(x.dtype)):
            return output
        a, b = factors
        padding = aligned(a.shape[1]) - a.shape[1]
        inner = grouped(x, F.pad(a, (0, 0, 0, padding)), offsets)
        return output + self._active.scale * grouped(inner, F.pad(b, (0, padding)), offsets)


@dataclass(slots=True, eq=False)
class _ActiveAdapter:
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # {} = none
    scale: float = 1.0


class AdapterSet:
    def __init__(self, model: PreTrainedModel, *, path: str, max_context: int) -> None:
        """`model`: loaded from `path` with PACKED attention. Its weights never change."""
        self._model = model.requires_grad_(False)
        self._path = path
        self.max_context = max_context
        self._num_ids = model.config.get_text_config().vocab_size
        self._layers = adaptable_layers(model)
        self._active = _ActiveAdapter()
        self.owned: dict[str, OwnedAdapter] = {}  # by name; removing one frees it
        check_adaptable(expert_modules(model).values())
        for layer, size in self._layers.items():
            adapted = _AdaptedLayer(layer, self._active)
            if len(size) == 2:
                model.get_submodule(layer).register_forward_hook(adapted)
            else:
                module, _, weight = layer.rpartition(".")
                add_update(model.get_submodule(module), weight, adapted)
        if model.device.type == "cuda":
            checkpoint_layers(model)

    def create(self, name: str, shape: AdapterShape, *, seed: int | None) -> None:
        """Add an adapter. B is 0, so it changes nothing yet."""
        layout = self._layout(shape)
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        parameters: dict[str, nn.Parameter] = {}
        for tensor, size in layout.shapes().items():
            values = torch.zeros(size)
            if ".lora_A." in tensor:
                values.uniform_(-(size[-1] ** -0.5), size[-1] ** -0.5, generator=generator)
            parameters[tensor] = nn.Parameter(values.to(self._model.device))
        self.owned[name] = OwnedAdapter(
            shape=shape,
            layout=layout,
            parameters=parameters,
            optimizer=torch.optim.AdamW(parameters.values()),
        )

    def _layout(self, shape: AdapterShape) -> Adapter:
        chosen = {
            layer: size
            for layer, size in self._layers.items()
            if (shape.attention if "attn" in layer or "attention" in layer else shape.mlp)
        }
        if not chosen:
            raise TaskError("The adapter has no layers; set train_attn or train_mlp to true.")
        scale = scale_of(ALPHA, rank=shape.rank, rslora=False)
        return Adapter(layers=chosen, rank=shape.rank, scale=scale)

    def compute(
        self,
        name: str,
        data: Sequence[TrainingDatum],
        *,
        loss: str,
        settings: Mapping[str, float],
        backward: bool,
    ) -> tuple[list[np.ndarray], float]:
        """The logprobs of the targets of each datum, float32 of their shape, and the summed loss.
        With `backward`, its gradient is added to that of the adapter."""
        function, names, limits = summed_loss(loss, settings)
        for datum in data:
            self._check(datum, names)
        adapter, device = self.owned[name], self._model.device
        outputs: list[np.ndarray] = []
        gradient, total = adapter.gradient, 0.0
        with self._applied(adapter.parameters, adapter.layout.scale):
            for part in _packs(data):
                with torch.set_grad_enabled(backward):
                    logprobs = self._logprobs(part)
                    value = torch.zeros((), device=device)
                    for own, datum in zip(logprobs, part, strict=True):
                        given = {key: _tensor(datum.inputs[key], device) for key in names}
                        value = value + function(own, given, limits)
                if backward:
                    gradient = _added(gradient, value, adapter.parameters)
                total += value.item()
                outputs += [own.detach().float().cpu().numpy() for own in logprobs]
        new = [] if gradient is None else list(gradient.values())
        if not np.isfinite(total) or not all(bool(each.isfinite().all()) for each in new):
            raise TaskError(f"The loss {total:g} or its gradient is not finite; it was dropped.")
        adapter.gradient = gradient
        return outputs, total

    def step(self, name: str, adam: AdamSettings) -> dict[str, float]:
        """Apply the gradient of an adapter, and begin the next one."""
        adapter = self.owned[name]
        if adapter.gradient is None:
            raise TaskError("There is no gradient to apply; call forward_backward first.")
        for group in adapter.optimizer.param_groups:
            group |= {
                "lr": adam.learning_rate,
                "betas": (adam.beta1, adam.beta2),
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
            }
        for tensor, parameter in adapter.parameters.items():
            parameter.grad = adapter.gradient[tensor]
        limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(adapter.parameters.values(), limit)
        adapter.optimizer.step()
        adapter.optimizer.zero_grad(set_to_none=True)
        adapter.gradient = None
        adapter.num_steps += 1
        return {"grad_norm": float(norm)}

    def save(self, name: str, folder: Path, *, optimizer: bool, about: dict[str, Any]) -> None:
        """Write an adapter as a PEFT folder, with the optimizer's state or without it. `about` is
        returned by read_about()."""
        adapter = self.owned[name]
        tensors = {tensor: value.detach() for tensor, value in adapter.parameters.items()}
        moments = {
            f"{tensor}.{key}": adapter.optimizer.state[parameter][key].cpu()
            for tensor, parameter in adapter.parameters.items()
            for key in (_MOMENTS if adapter.num_steps and optimizer else ())
        }

        def write(unfinished: Path) -> None:
            _write_folder(unfinished, tensors, layout=adapter.layout, alpha=ALPHA, path=self._path)
            if moments:
                save_file(moments, unfinished / _OPTIMIZER_FILE)

        about = {**about, "num_steps": adapter.num_steps, "shape": asdict(adapter.shape)}
        size = sum(t.numel() * 4 for t in (*tensors.values(), *moments.values()))
        write_checkpoint(folder, write=write, run_state=about, needed_bytes=size)

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Continue an adapter from what save() wrote."""
        adapter, about = self.owned[name], read_about(folder)
        saved = read_checkpoint(folder)
        shapes = {tensor: tuple(value.shape) for tensor, value in saved.items()}
        if shapes != adapter.layout.shapes():
            raise TaskError(
                "The saved adapter has other layers or another rank; create the model with"
                f" {about['shape']}, as it was trained."
            )
        file = folder / _OPTIMIZER_FILE
        moments = load_file(file) if optimizer and file.is_file() else {}
        fresh = torch.optim.AdamW(adapter.parameters.values())
        with torch.no_grad():
            for tensor, parameter in adapter.parameters.items():
                parameter.copy_(saved[tensor])
                if moments:
                    state = {key: moments[f"{tensor}.{key}"].to(parameter) for key in _MOMENTS}
                    step = torch.tensor(float(about["num_steps"]))
                    fresh.state[parameter] = {"step": step, **state}
        adapter.optimizer, adapter.gradient = fresh, None
        adapter.num_steps = about["num_steps"] if moments else 0

    def write_blank(self, folder: Path, *, rank: int) -> None:
        """Write an adapter of this rank that adapts every layer and changes nothing."""
        layout = Adapter(layers=self._layers, rank=rank, scale=1.0)
        dtype = self._model.dtype
        tensors = {name: torch.zeros(size, dtype=dtype) for name, size in layout.shapes().items()}
        folder.mkdir(parents=True, exist_ok=True)
        _write_folder(folder, tensors, layout=layout, alpha=rank, path=self._path)

    def prompt_logprobs(self, tokens: np.ndarray, folder: Path | None) -> np.ndarray:
        """Logprobs [L] of tokens [L], with a saved adapter or without one. The first is NaN."""
        if len(tokens) == 1:
            return np.full(1, np.nan, np.float32)
        inputs = {TARGETS: tokens[1:].astype(np.int64)}
        datum = TrainingDatum(tokens=tokens[:-1].astype(np.int64), inputs=inputs)
        self._check(datum, ())
        saved, scale = {}, 1.0
        if folder is not None:
            device, rank = self._model.device, read_about(folder)["shape"]["rank"]
            saved = {name: t.to(device) for name, t in read_checkpoint(folder).items()}
            scale = scale_of(ALPHA, rank=rank, rslora=False)
        with torch.no_grad(), self._applied(saved, scale):
            scored = self._logprobs([datum])[0].float().cpu().numpy()
        return np.append(np.float32(np.nan), scored)

    def _check(self, datum: TrainingDatum, inputs: Sequence[str]) -> None:
        """Raise TaskError, because a wrong index on a GPU would end the process."""
        if not 0 < len(datum.tokens) <= self.max_context:
            raise TaskError(
                f"A datum has {len(datum.tokens)} tokens, but 1 to {self.max_context} are allowed."
            )
        for name in (TARGETS, *inputs):
            if name not in datum.inputs:
                raise TaskError(f"A datum lacks the input {name!r} of its loss.")
            size = datum.inputs[TARGETS].shape
            if datum.inputs[name].shape != size or size[:1] != (len(datum.tokens),):
                raise TaskError(
                    f"A datum of {len(datum.tokens)} tokens has {name!r} of the shape"
                    f" {datum.inputs[name].shape}; give a row for each token in every input."
                )
        for ids in (datum.tokens, datum.inputs[TARGETS]):
            if ids.dtype.kind != "i" or ((ids < 0) | (ids >= self._num_ids)).any():
                raise TaskError(f"A token is not an integer from 0 to {self._num_ids - 1}.")

    @contextmanager
    def _applied(self, tensors: Mapping[str, Tensor], scale: float) -> Iterator[None]:
        self._active.tensors, self._active.scale = tensors, scale
        try:
            yield
        finally:
            self._active.tensors = {}

    def _logprobs(self, data: Sequence[TrainingDatum]) -> list[Tensor]:
        """Logprobs of the targets of each datum, of their shape; differentiable."""
        device, lengths = self._model.device, [len(datum.tokens) for datum in data]
        tokens = np.concatenate([datum.tokens for datum in data])
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden = hidden_states(
            self._model,
            input_ids=_tensor(tokens, device)[None],
            position_ids=_tensor(positions, device)[None],
            layout=PackedLayout(lengths, device=device),
        )
        targets = [datum.inputs[TARGETS] for datum in data]
        counts = np.concatenate([np.full(len(t), t[0].size) for t in targets])
        if counts.max() > 1:  # a row for each of several targets of a token
            hidden = hidden.repeat_interleave(_tensor(counts, device), dim=0)
        flat = _tensor(np.concatenate([t.ravel() for t in targets]), device)
        logprobs, _, _ = chunked_distributions(
            self._model,
            hidden,
            flat,
            temperatures=torch.ones(len(flat), device=device),
            kept=None,
            chunk=_LOGPROB_CHUNK,
        )
        parts = logprobs.split([t.size for t in targets])
        return [part.view(t.shape) for part, t in zip(parts, targets, strict=True)]


def read_about(folder: Path) -> dict[str, Any]:
    """What save() was told about an adapter, its shape and its number of steps."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no saved adapter {folder.name!r}.")
    return read_run_state(folder)


def _added(
    gradient: dict[str, Tensor] | None, value: Tensor, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The gradient plus that of `value`, in new tensors: a later pass may fail."""
    new = torch.autograd.grad(
        value, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    added = dict(zip(parameters, new, strict=True))
    return added if gradient is None else {n: gradient[n] + grad for n, grad in added.items()}


def _packs(data: Sequence[TrainingDatum]) -> Iterator[list[TrainingDatum]]:
    """The data of each forward pass."""
    pack: list[TrainingDatum] = []
    room = _PASS_TOKENS
    for datum in data:
        if pack and len(datum.tokens) > room:
            yield pack
            pack, room = [], _PASS_TOKENS
        pack.append(datum)
        room -= len(datum.tokens)
    yield pack


def _write_folder(
    folder: Path, tensors: Mapping[str, Tensor], *, layout: Adapter, alpha: float, path: str
) -> None:
    experts = sorted(layer for layer, size in layout.layers.items() if len(size) == 3)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": path,
        "r": layout.rank,
        "lora_alpha": alpha,
        "target_modules": sorted(layout.layers.keys() - set(experts)),
        "target_parameters": experts or None,
    }
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    named = {f"{NAME_PREFIX}{name}": t.cpu().contiguous() for name, t in to_peft(tensors).items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)  # copies, because bodies of requests are read-only
