"""Loads Hugging Face checkpoints for engines and the trainer, and writes weights to files.

Promise: a loaded model computes what the checkpoint says: no weight is random, and hidden_states
followed by final_logits gives the model's own logits. Other models are refused in one sentence.

T = tokens of one forward pass, D = hidden size.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.mixin import DistributedMixin
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from millrace.core.errors import ConfigError
from millrace.core.files import sync
from millrace.models import support
from millrace.models.attention.recurrent import begin_pass
from millrace.models.directory import LOADING_ERRORS, check_directory, first_line, read_config
from millrace.models.lora.factors import expert_modules


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: support.AttentionPath,
    trust_remote_code: bool = False,
    shard: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """The model at `path`, a directory or hub name, in eval mode, after a self-test of its
    attention. `shard` makes DTensors of weights without memory, so that ranks load their shards."""
    config = read_config(path, trust_remote_code=trust_remote_code)
    support.check_supported(
        config, path=path, attention=attention, trust_remote_code=trust_remote_code
    )
    quantization = getattr(config, "quantization_config", None) or {}
    is_mxfp4 = quantization.get("quant_method") == "mxfp4"  # experts of GPT-OSS
    with nullcontext() if shard is None else _loading_shards(shard, device):
        model = load_pretrained(
            AutoModelForCausalLM,
            path,
            setting="model.path",
            remedy="save it again with save_pretrained",
            dtype=dtype,
            attn_implementation=attention.name,
            trust_remote_code=trust_remote_code,
            **({} if shard is None else {"distributed_config": DistributedConfig()}),
            **({"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}),
        )
    if is_mxfp4:  # transformers gives experts in bfloat16, and would save them by packed names
        for experts in expert_modules(model).values():
            experts.to(dtype)
        vars(model)["_weight_conversions"] = None
    if shard is None:
        model.to(device)
    else:
        del model.config.distributed_config  # it would be saved with the model
    support.fix_rotary_factors(model)
    support.name_backbone(model)
    return model.eval()


def empty_model(path: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model at `path` without values: names, shapes and the layout of files."""
    config = read_config(path, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(f"Model {path!r} cannot be loaded: {first_line(error)}.") from error


@contextmanager
def _loading_shards(shard: Callable[[Any], None], device: torch.device) -> Iterator[None]:
    """A context in which from_pretrained(distributed_config=...) divides models as `shard` does.
    transformers' own division has no replicas, and sees neither a critic's root nor adapters."""

    meshes = SimpleNamespace(get_mesh=lambda names: None)  # the loader finds it in the tensors

    def prepare(cls: type, config: Any, **_: Any) -> tuple[Any, torch.device, Any]:
        return config, device, meshes

    def distribute(cls: type, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
        model.tie_weights()  # before they are sharded: a tied weight is one shard
        support.use_own_classes(model)
        shard(model)
        return model

    own = {"prepare_distribute_model": prepare, "maybe_distribute_model": distribute}
    before = {name: vars(DistributedMixin)[name] for name in own}
    for name, function in own.items():
        setattr(DistributedMixin, name, classmethod(function))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(DistributedMixin, name, method)


def load_pretrained(kind: Any, path: str, *, setting: str, remedy: str, **options: Any) -> Any:
    """The model of a transformers class; `remedy` is for a model that lacks weights."""
    check_directory(path, setting=setting)
    try:
        with without_progress_bars():
            model, info = kind.from_pretrained(path, output_loading_info=True, **options)
    except LOADING_ERRORS as error:
        raise ConfigError(f"Model {path!r} cannot be loaded: {first_line(error)}.") from error
    if missing := sorted(info["missing_keys"]):
        # transformers would fill these with random numbers.
        raise ConfigError(
            f"Model {path!r} lacks {len(missing)} of its weights, {missing[0]!r} among them;"
            f" {remedy}."
        )
    support.use_own_classes(model)
    return model


def hidden_states(
    model: PreTrainedModel, *, input_ids: Tensor, position_ids: Tensor, **attention_kwargs: Any
) -> Tensor:
    """[1, T] ids and positions -> [T, D] hidden states, ready for final_logits. The other arguments
    reach the model's attention function at every layer."""
    begin_pass(model, attention_kwargs.get("layout") or attention_kwargs.get("millrace_paged"))
    output = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention_kwargs
    )
    if not torch.is_grad_enabled():  # else a checkpointed layer may run again
        begin_pass(model, None)
    return output.last_hidden_state[0]


def generation_stop_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """The stop_token_ids() of a model that is not loaded."""
    try:
        config = GenerationConfig.from_pretrained(path)
    except OSError:  # it has none, and transformers makes one of the model's configuration
        config = GenerationConfig.from_model_config(
            read_config(path, trust_remote_code=trust_remote_code)
        )
    return stop_token_ids(config, tokenizer)


def stop_token_ids(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Tokens that end a completion: eos of a model's generation config and of the tokenizer."""
    configured = config.eos_token_id if config else None
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """A context without transformers' progress bars, which would hide errors in a worker's log."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def write_model(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write weights, by the model's names, as a Hugging Face directory. Reads nothing of the model
    that training changes, so another thread may call it."""
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=dict(weights))


def write_model_parts(
    model: PreTrainedModel, parts: Iterable[dict[str, Tensor]], folder: Path
) -> None:
    """Like write_model(), but each part becomes a file before the next is taken. Weights of a layer
    are in one part, because transformers converts them together."""
    files: list[Path] = []
    for weights in parts:
        with without_progress_bars():
            model.save_pretrained(folder, state_dict=weights, max_shard_size=2**62)
        files.append(folder / f"part_{len(files)}")
        (folder / SAFE_WEIGHTS_NAME).rename(files[-1])
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with safe_open(file, framework="pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), name)
        file.rename(folder / name)
    num_bytes = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, version: int) -> None:
    """Replace the file at `path`, completely or not at all, even if the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, partial, metadata={"version": str(version)})
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def read_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The version and the tensors that write_weights() wrote."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return int(file.metadata()["version"]), tensors


def read_weights_version(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["version"])
