"""Devices, data types, threads and memory of a process. Imports torch, but not transformers, so
that the controller can use it."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from millrace.config import RunConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.errors import ConfigError
from millrace.models.directory import num_weights

GIB = 2**30
FREE_TIMEOUT_S = 30.0  # for the driver to free the memory of a process that was killed
_STATE_BYTES = {ADAMW: 8, MUON: 4, ADAMW_8BIT: 2}  # of the optimizer per weight, at least


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def use_threads(count: int | None) -> None:
    """Of this process; None = as many as there are cores. On Arm, oneDNN uses all cores whatever
    the count, so workers would wait for each other; only its products in bfloat16 are faster."""
    if count is not None:
        torch.set_num_threads(count)
    if platform.machine() == "aarch64" and torch.backends.mkldnn.is_available():
        torch.backends.mkldnn.enabled = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def resolve_device(name: str) -> torch.device:
    """ "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1" -> device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Device {name!r} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"Device {name!r} does not exist: PyTorch sees {torch.cuda.device_count()} CUDA"
            " devices; use 'auto' or 'cpu'."
        )
    return device


def use_device(device: torch.device) -> None:
    """Train on it. Segments of GPU memory grow, unless the user has chosen otherwise: batches of
    varying sizes would leave unusable gaps between segments of fixed sizes."""
    if device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings(_allocator_settings())


@contextmanager
def fixed_segments() -> Iterator[None]:
    """For memory that another process opens. Containers often forbid this for growing segments:
    torch then takes a file descriptor from the other process."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(_allocator_settings())


def _allocator_settings() -> str:
    given = (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return next(filter(None, given), "expandable_segments:True")


def compute_dtype(config: RunConfig) -> torch.dtype:
    return resolve_dtype(config.trainer.dtype, resolve_device(config.placement.trainer[0]))


def frozen_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of matrices beneath an adapter: bfloat16 if they are used in bfloat16 only. DoRA
    needs their norms in float32, and float16 passes compute experts in float32."""
    is_half = compute_dtype(config) is torch.bfloat16
    return torch.bfloat16 if is_half and config.lora and not config.lora.dora else torch.float32


def rank_bytes(config: RunConfig, *, num_weights: int) -> int:
    """Bytes of one rank, at least: weights, gradients and the state of a built-in optimizer that is
    not offloaded, without activations and the critic. What exceeds it cannot fit."""
    sizes = config.trainer.mesh_sizes
    num_shards = sizes.num_ranks // sizes.dp_replicate
    optimizer = config.optimizer
    if config.lora is not None:
        per_weight = frozen_dtype(config).itemsize
    else:
        per_weight = 8 + (0 if optimizer.offload else _STATE_BYTES.get(optimizer.type, 0))
    return num_weights * per_weight // num_shards


def check_free_memory(
    config: RunConfig, device: torch.device, *, patience_s: float = FREE_TIMEOUT_S
) -> None:
    """Refuse a rank that does not fit into the free memory of its GPU, before it loads. The memory
    of a killed rank takes a while to be freed. Engines that sleep during a step give theirs back,
    so they do not count."""
    if device.type != "cuda" or config.cluster.share_gpu == "sleep":
        return
    needed = rank_bytes(config, num_weights=num_weights(config.model.path) or 0)
    deadline_s = time.monotonic() + patience_s
    while (memory := torch.cuda.mem_get_info(device))[0] < needed and time.monotonic() < deadline_s:
        time.sleep(0.1)
    free, total = memory
    if needed > free:
        raise ConfigError(
            f"A rank of the trainer needs {needed / GIB:.1f} GiB for weights and optimizer state"
            f" alone, and {device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free; stop what"
            " else uses it, or use more ranks, optimizer.offload = true or a LoRA adapter."
        )
