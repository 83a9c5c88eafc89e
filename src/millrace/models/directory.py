"""What a model directory says without its weights: tokenizer and configuration.

The controller reads these to check a user's input, so nothing here imports modelling code.

What tells two tokenizers apart where only one of them is at hand.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from millrace.core.errors import ConfigError

# What transformers raises for files that are missing, damaged, or of a kind it does not know.
LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    check_directory(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"The tokenizer of {path!r} cannot be loaded: {first_line(error)}."
        ) from error


def configured_context(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Longest sequence the model at `path` says it can take, read without its weights."""
    config = text_config(path, trust_remote_code=trust_remote_code)
    return getattr(config, "max_position_embeddings", None)


def has_experts(path: str, *, trust_remote_code: bool = False) -> bool:
    """True if the configuration of the model at `path` describes a mixture of experts."""
    config = text_config(path, trust_remote_code=trust_remote_code)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config, name, None) for name in names)


def text_config(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.path"
) -> PreTrainedConfig:
    """What the model at `path` says about itself, as far as it concerns text."""
    check_directory(path, setting=setting)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(f"Model {path!r} cannot be read: {first_line(error)}.") from error
    return config.get_text_config()


def check_directory(path: str, *, setting: str = "model.path") -> None:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"Model {path!r} is not a model directory: it has no config.json;"
                f" point {setting} at what save_pretrained wrote."
            )
        return
    # Hub names are "name" or "owner/name"; everything else can only be meant as a path.
    if folder.is_absolute() or len(folder.parts) > 2 or path.startswith((".", "~")):
        raise ConfigError(f"Model {path!r} does not exist; check {setting}.")


def first_line(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it knows no {error}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


def vocabulary_checksum(tokenizer: Any) -> str:
    """The same for tokenizers whose ids mean the same, and for no others."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[::-1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
