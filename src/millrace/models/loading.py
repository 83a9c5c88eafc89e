"""A Hugging Face checkpoint becomes a module that engines and the trainer run.

Promise: what load_model returns computes what the checkpoint says: no weight was made up, and
hidden_states followed by final_logits gives the model's own logits. Anything else is refused at
load, in one sentence.

T = tokens of one forward pass, D = hidden size.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from millrace.core.errors import ConfigError
from millrace.models.directory import LOADING_ERRORS, check_directory, first_line
from millrace.models.support import PROBE_ATTENTION, check_supported


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model at `path` (directory or hub name) in eval mode.

    `attention` is a name registered with transformers' AttentionInterface.
    """
    check_directory(path)
    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=PROBE_ATTENTION,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        raise ConfigError(f"Model {path!r} cannot be loaded: {first_line(error)}.") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers fills these with random numbers, which is never what a run wants.
        raise ConfigError(
            f"Model {path!r} lacks {len(missing)} of its weights, {missing[0]!r} among them;"
            " save it again with save_pretrained."
        )
    model.to(device).eval()
    check_supported(model, path=path)
    model.set_attn_implementation(attention)
    return model


def hidden_states(
    model: PreTrainedModel, *, input_ids: Tensor, position_ids: Tensor, **attention_kwargs: Any
) -> Tensor:
    """[1, T] ids and positions -> [T, D] hidden states, ready for final_logits.

    attention_kwargs reach the model's attention function at every layer.
    """
    output = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention_kwargs
    )
    return output.last_hidden_state[0]


def max_context(model: PreTrainedModel) -> int:
    """Longest sequence the model's positions allow."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        raise ConfigError(
            f"Model {model.name_or_path!r} states no longest context; set engine.max_context."
        )
    return limit


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: the eos of the generation settings and of the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def resolve_device(name: str) -> torch.device:
    """ "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1" -> device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Device {name!r} is not known; use 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"Device {name!r} does not exist: PyTorch sees {torch.cuda.device_count()} CUDA"
            " devices; use 'auto' or 'cpu'."
        )
    return device


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within it transformers draws none: in a worker's log they would drown the errors."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def write_model(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write these weights, by the model's names, as a Hugging Face directory of its kind.

    Reads nothing of the model that training changes, so that another thread may do it."""
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=dict(weights))
