"""Reads a model directory without its weights: tokenizer and configuration.

The controller checks the user's input with it. transformers is imported on first use, so that
errors that need no model file are reported before.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from millrace.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HUB_TIMEOUT_S = 10.0

# What transformers raises for files that are missing, damaged, or of an unknown kind.
LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    check_directory(path)
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"Model {path!r} has no tokenizer; save one there with tokenizer.save_pretrained()."
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"The tokenizer of {path!r} cannot be loaded: {first_line(error)}."
        ) from error


def context_length(
    path: str, *, wanted: int | None, setting: str, trust_remote_code: bool = False
) -> int:
    """Length of the longest sequence in tokens: `wanted`, which `setting` sets, or the limit that
    the configuration of the model at `path` states."""
    config = text_config(path, trust_remote_code=trust_remote_code)
    return context_limit(config, path, wanted=wanted, setting=setting)


def context_limit(config: Any, path: str, *, wanted: int | None, setting: str) -> int:
    """The context_length() of a configuration that was read before."""
    limit = max_positions(config)
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(
            f"{setting} = {wanted} exceeds the {limit} tokens that {path!r} allows"
            f"{_limit_reason(config)}; lower it."
        )
    if (length := wanted or limit) is None:
        raise ConfigError(f"Model {path!r} does not state its context length; set {setting}.")
    return length


def context_note(
    path: str, *, wanted: int | None, setting: str, trust_remote_code: bool = False
) -> str | None:
    """What the user should see if sequences end before the length that the model at `path` states,
    and `setting` did not choose their limit."""
    config = text_config(path, trust_remote_code=trust_remote_code)
    limit, reason = max_positions(config), _limit_reason(config)
    if wanted is not None or not reason:
        return None
    return (
        f"Sequences end at {limit} tokens ({setting}), not at the {config.max_position_embeddings}"
        f" that {path!r} states{reason}; set {setting} to choose a limit up to {limit}."
    )


def _limit_reason(config: "PreTrainedConfig") -> str:
    """Why max_positions() is less than the configuration states, as the end of a clause; "" if it
    is not."""
    stated, limit = getattr(config, "max_position_embeddings", None), max_positions(config)
    if stated is None or limit is None or limit >= stated:
        return ""
    return ", because LongRoPE computes longer sequences with other factors"


def max_positions(config: "PreTrainedConfig") -> int | None:
    """The longest sequence that the model with this text configuration computes; None if it states
    none. LongRoPE changes the factors of all tokens once a sequence is longer than in the model's
    first training: tokens sampled before that, and their KV, belong to other factors than the whole
    sequence. So sequences end there."""
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in rope_tables(config):
        if rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min((limit for limit in limits if limit is not None), default=None)


def attention_chunk(config: "PreTrainedConfig") -> int | None:
    """The size of the chunks of the context within which layers attend (Llama 4); None without."""
    kinds = getattr(config, "layer_types", None) or ()
    return config.attention_chunk_size if "chunked_attention" in kinds else None


def rope_tables(config: "PreTrainedConfig") -> list[dict[str, Any]]:
    """The rotary settings of a model; some have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def num_experts(config: "PreTrainedConfig") -> int:
    """Number of experts in each layer of a mixture of experts; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((number for name in names if (number := getattr(config, name, None))), 0)


def _snapshot_of(name: str) -> Path | None:
    """The folder of a model of the hub in this host's cache, if it has the configuration."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _weight_files(path: str) -> list[Path]:
    """The safetensors files of a model; empty if they are not on this host."""
    folder = Path(path) if Path(path).is_dir() else _snapshot_of(path) or Path(path)
    index, names = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = [folder / name for name in names]
    return files if all(file.is_file() for file in files) else []


def weight_shapes(path: str) -> dict[str, list[int]]:
    """Shapes in the safetensors files of a model, by name; empty if the files are not on this host,
    or if there is no such model or a file is damaged, which loading reports."""
    shapes: dict[str, list[int]] = {}
    try:
        for file in _weight_files(path):
            with safe_open(file, framework="np") as tensors:
                names = tensors.keys()
                shapes |= {name: tensors.get_slice(name).get_shape() for name in names}
    except (SafetensorError, ValueError, KeyError, OSError):
        return {}
    return shapes


def num_weights(path: str) -> int:
    """Number of weights in the safetensors files of a model; 0 if weight_shapes() is empty."""
    return sum(map(math.prod, weight_shapes(path).values()))


def weights_identity(path: str) -> str:
    """What tells two trainings of one architecture apart. For a model of the hub, whose weights may
    not be on this host yet, the commit that its configuration is of; otherwise a checksum of the
    sizes and of the first and last MiB of the safetensors files."""
    if not Path(path).is_dir():
        snapshot = _snapshot_of(path)
        return snapshot.name if snapshot is not None else ""
    found = hashlib.sha256()
    for file in _weight_files(path):
        size = file.stat().st_size
        with file.open("rb") as data:
            found.update(f"{size} ".encode() + data.read(2**20))
            data.seek(max(0, size - 2**20))
            found.update(data.read())
    return found.hexdigest()


def text_config(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.path"
) -> "PreTrainedConfig":
    """The configuration of the text model at `path`."""
    config = read_config(path, trust_remote_code=trust_remote_code, setting=setting)
    return config.get_text_config()


def read_config(
    path: str, *, trust_remote_code: bool = False, setting: str = "model.path"
) -> "PreTrainedConfig":
    """The configuration of the model at `path`; it may have parts besides the text model."""
    check_directory(path, setting=setting)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise ConfigError(f"Model {path!r} cannot be read: {first_line(error)}.") from error


def check_directory(path: str, *, setting: str = "model.path") -> None:
    """Raise ConfigError unless `path` is a model directory, or a model that the hub has."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise ConfigError(
                    f"Model {path!r} is a LoRA adapter without its base model; set {setting} to a"
                    " model into which it is merged (lora.export_merged of the run that trained it,"
                    " or merge_and_unload of PEFT)."
                )
            raise ConfigError(
                f"Model {path!r} is not a model directory: it has no config.json;"
                f" point {setting} at what save_pretrained wrote."
            )
        return
    # Hub names are "name" or "owner/name"; everything else can only be a path.
    is_path = folder.is_absolute() or len(folder.parts) > 2 or path.startswith((".", "~"))
    # So is a name within a folder that exists here, such as "runs/modle".
    if is_path or (len(folder.parts) == 2 and folder.parent.is_dir()):
        raise ConfigError(f"Model {path!r} does not exist; {_neighbour(folder, setting)}")
    _check_hub(path, setting=setting)


def _neighbour(folder: Path, setting: str) -> str:
    """The model directory that was probably meant."""
    parent = folder.parent
    if parent.is_dir():
        known = [child.name for child in parent.iterdir() if (child / "config.json").is_file()]
        if (found := nearest(folder.name, known)) is not None:
            return f"did you mean {str(parent / found)!r}?"
    return f"check {setting}."


def _check_hub(path: str, *, setting: str) -> None:
    """Ask once, and without the retries of a download: a mistyped path must not take minutes."""
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of httpx or httpx2
        OfflineModeIsEnabled,
    )

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        model_info(path, timeout=HUB_TIMEOUT_S)
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = "it is not there" if "404" in str(error) else type(error).__name__
        raise ConfigError(
            f"Model {path!r} is neither a directory here nor a model that the hub gives ({reason});"
            f" {_neighbour(Path(path), setting)}"
        ) from error


def first_line(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")


def vocabulary_checksum(tokenizer: Any) -> str:
    """A checksum of a tokenizer's ids, which compares it with one that is not at hand."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[::-1])
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
