"""Estimates the memory of a rank before it loads the model.

Promise: only what cannot fit is refused. The estimate counts weights, gradients and the state of a
built-in optimizer unless it is offloaded, and leaves out activations and the critic.
"""

import os

import torch
from safetensors import SafetensorError

from millrace.config import RunConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.errors import ConfigError
from millrace.models.directory import num_weights
from millrace.training.build import frozen_dtype

GIB = 2**30
_STATE_BYTES = {ADAMW: 8, MUON: 4, ADAMW_8BIT: 2}  # of the optimizer per weight, at least


def check_memory(config: RunConfig, *, path: str, num_sharing: int, total_bytes: int) -> None:
    """Raise ConfigError if the `num_sharing` ranks on one device need more than `total_bytes`."""
    try:
        weights = num_weights(path)
    except (SafetensorError, ValueError, KeyError, OSError):
        return  # loading reports a damaged file
    if weights is None:
        return
    needed = num_sharing * rank_bytes(config, num_weights=weights)
    if needed > total_bytes:
        raise ConfigError(
            f"Model {path!r} does not fit: with trainer.ranks = {config.trainer.ranks} its weights,"
            f" gradients and optimizer state need {needed / GIB:.1f} GiB on a device that has"
            f" {total_bytes / GIB:.1f} GiB; use more devices, set optimizer.offload = true on a"
            " GPU, or train a smaller model or a LoRA adapter."
        )


def rank_bytes(config: RunConfig, *, num_weights: int) -> int:
    """Bytes of the state of one rank, at least."""
    sizes = config.trainer.mesh_sizes
    num_shards = sizes.num_ranks // sizes.dp_replicate
    optimizer = config.optimizer
    if config.lora is not None:
        per_weight = frozen_dtype(config).itemsize
    else:
        per_weight = 8 + (0 if optimizer.offload else _STATE_BYTES.get(optimizer.type, 0))
    return num_weights * per_weight // num_shards


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
