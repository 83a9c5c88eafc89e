"""An adapter in training: created by PEFT and saved as a PEFT folder.

Promise: PeftModel.from_pretrained loads what write() wrote.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.config import LoraConfig
from millrace.core.errors import CheckpointError
from millrace.models.lora import factors
from millrace.models.lora.folders import NAME_PREFIX, WEIGHTS_FILE, read_checkpoint, to_peft
from millrace.models.sharding import shard_like, whole, whole_units

_ADAPTER = "default"  # PEFT's name of a model's only adapter


class TrainedAdapter:
    """An adapter in a model whose base weights are frozen. Used by one thread."""

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, *, model_path: str) -> None:
        """Add an adapter to `model`, loaded from `model_path`. B is 0: its output is unchanged."""
        factors.require_peft()
        import peft

        self._model = model
        self._adapter = factors.adapter_of(model, lora)
        experts = [name for name, shape in self._adapter.layers.items() if len(shape) == 3]
        linears = sorted(self._adapter.layers.keys() - set(experts))
        is_local = Path(model_path).exists()
        self._settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] - a quotient of it is used
            target_modules=linears,
            target_parameters=experts or None,
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            base_model_name_or_path=str(Path(model_path).absolute()) if is_local else model_path,
        )
        self._inject(linears)
        self._experts = self._add_to_experts(experts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        train_in_float32(model)
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        divided = next((mesh for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), None)
        if divided is not None:
            from millrace.models.parallel_plans import divide_factors

            divide_factors(model, self._linears, divided["tp"], adapter=_ADAPTER)
        model.eval()  # new modules start in train mode

    def _inject(self, linears: list[str]) -> None:
        """Add PEFT's layers. It does not see the model's config, so that it takes names as they
        are: of some mixtures it takes "gate_proj" for experts in earlier versions of
        transformers."""
        import peft

        model = self._model
        targets = {id(model.get_submodule(name)): name for name in linears}
        # PEFT reads shapes, and DoRA reads the weights.
        for unit in whole_units(model):
            here = [targets[id(module)] for module in unit.modules() if id(module) in targets]
            if here:
                names = [f"model.{name}" for name in here]
                settings = replace(self._settings, target_modules=names, target_parameters=None)
                holder = nn.ModuleDict({"model": model})
                layers = [model.get_submodule(name) for name in here]
                with _looking_whole(layers, has_values=self._adapter.is_dora):
                    peft.inject_adapter_in_model(settings, holder, adapter_name=_ADAPTER)
            targets = {key: name for key, name in targets.items() if name not in here}
        self._linears: dict[str, Any] = {name: model.get_submodule(name) for name in linears}

    def _add_to_experts(self, names: list[str]) -> dict[str, factors.TrainedUpdate]:
        updates: dict[str, factors.TrainedUpdate] = {}
        own = self._adapter
        for name in names:
            module, _, weight = name.rpartition(".")
            parameter, shape = self._model.get_parameter(name), own.layers[name]
            update = factors.TrainedUpdate(parameter, shape=shape, rank=own.rank, scale=own.scale)
            updates[name] = update
            factors.add_update(self._model.get_submodule(module), weight, updates[name])
        return updates

    def named_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name in self._adapter.layers:
            if name in self._experts:
                update = self._experts[name]
                tensors = [update.lora_A, update.lora_B]
            else:
                layer = self._linears[name]
                magnitude = [layer.lora_magnitude_vector] if self._adapter.is_dora else []
                parts = (layer.lora_A, layer.lora_B, *magnitude)
                tensors = [part[_ADAPTER].weight for part in parts]
            names = factors.tensor_names(name, dora=self._adapter.is_dora)
            weights |= {n: t.detach() for n, t in zip(names, tensors, strict=True)}
        return weights

    def changing(self, num_rows: int) -> AbstractContextManager[None]:
        """A context for a pass over so many rows, and for its backward pass."""
        return nullcontext()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model computes without the adapter."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, is_enabled: bool) -> None:
        for layer in self._linears.values():
            layer.enable_adapters(is_enabled)
        for update in self._experts.values():
            update.is_enabled = is_enabled

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Save a copy of named_weights() as a PEFT folder. Any thread may call this."""
        self._settings.save_pretrained(str(folder))
        tensors = {f"{NAME_PREFIX}{name}": w.cpu() for name, w in to_peft(weights).items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Load the weights that write() wrote."""
        saved, own = read_checkpoint(folder), self.named_weights()
        for name in sorted(saved.keys() | own.keys()):
            if name not in saved or name not in own or saved[name].shape != own[name].shape:
                raise CheckpointError(
                    f"The adapter in {str(folder)!r} does not match the model and [lora]: they"
                    f" differ in {name!r}; resume with those it was trained with."
                )
            own[name].copy_(shard_like(saved[name], own[name]))

    def merged_weights(self) -> dict[str, Tensor]:
        """Weights of the model with the adapter merged, by the names of the base model. They are
        sharded as the model is; merged ones are on the host."""
        adapter, own = self._adapter, self.named_weights()
        layers = {adapter.weight_name(layer): layer for layer in adapter.layers}
        weights: dict[str, Tensor] = {}
        for own_name, tensor in self._model.state_dict(keep_vars=True).items():
            name = own_name.replace(".base_layer.", ".")
            if ".lora_" in own_name:
                continue
            if name not in layers:
                weights[name] = tensor
                continue
            names = factors.tensor_names(layers[name], dora=adapter.is_dora)
            tensors = {n: whole(own[n]) for n in names}  # of one layer at a time
            with torch.no_grad():
                value = adapter.merged(layers[name], whole(tensor), tensors).to(tensor.dtype)
            weights[name] = shard_like(value, tensor, device=torch.device("cpu"))
        return weights


def train_in_float32(model: PreTrainedModel) -> None:
    """Convert a model that was loaded in 16 bits, except for frozen matrices. Autocast would round
    these to 16 bits in each pass; the adapter, the residual stream and the head need float32.
    Sharded weights were loaded like this."""
    head = model.get_output_embeddings()
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear) and module is not head
        for parameter in module.parameters(recurse=False):
            is_matrix = parameter.ndim == 3 or (is_linear and parameter.ndim == 2)
            is_kept = is_matrix and not parameter.requires_grad
            is_kept = is_kept or isinstance(parameter, DTensor)
            if parameter.dtype != torch.float32 and not is_kept:
                parameter.data = parameter.data.float()


@contextmanager
def _looking_whole(layers: list[nn.Module], *, has_values: bool) -> Iterator[None]:
    """A context in which weights of tensor parallelism have their whole shape, and values only if
    asked for: PEFT would create factors for a rank's part, and other random numbers than on one
    rank."""
    divided = {m: m.weight for m in layers if isinstance(m.weight, DTensor)}
    for module, weight in divided.items():
        if has_values:
            values = whole(weight.detach())
        else:
            values = weight.to_local().detach().new_empty(()).expand(weight.shape)
        module.weight = nn.Parameter(values, requires_grad=False)
    try:
        yield
    finally:
        for module, weight in divided.items():
            module.weight = weight
