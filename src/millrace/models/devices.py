"""Devices, data types, threads and memory of a process. Imports torch, but not transformers, so
that the controller can use it."""

import math
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace.config import ALL_LINEAR, LoraConfig, RunConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.errors import ConfigError
from millrace.models.directory import weight_shapes
from millrace.models.lora.nf4 import BITS

GIB = 2**30
FREE_TIMEOUT_S = 30.0  # for the driver to free the memory of a process that was killed
_IN_LAYER = re.compile(r"\.\d+\.")  # in the names of weights
_ROUTERS = ("gate", "router")  # of experts; most models do not make them linear layers
_STATE_BYTES = {ADAMW: 8, MUON: 4, ADAMW_8BIT: 2}  # of the optimizer per weight, at least


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def use_threads(count: int | None) -> None:
    """Set the number of threads of this process; None = one per core. On Arm, oneDNN uses all cores
    anyway, so workers would wait for each other; it is kept only where it has bfloat16 products."""
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
    """Allocate memory that another process can open. Growing segments would need a file descriptor
    from this process, which containers often forbid."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of weights that a trainer holds; 0 = not known."""

    num_weights: int  # of the model
    num_outside: int = 0  # of these, in embeddings and head, which stay float32
    linear_factors: int = 0  # weights of an adapter of linear layers; all ranks have them
    expert_factors: int = 0  # weights of an adapter of experts, which ranks share
    critic: int = 0

    @classmethod
    def read(cls, config: RunConfig) -> "ModelSize":
        """Read the sizes from the headers of the files. It may miss some layers of an adapter."""
        shapes, critic = weight_shapes(config.model.path), config.critic
        of_critic = {} if critic is None else weight_shapes(critic.path or config.model.path)
        linear, experts = (0, 0) if config.lora is None else _factors(shapes, config.lora)
        return cls(
            num_weights=sum(map(math.prod, shapes.values())),
            num_outside=sum(math.prod(s) for n, s in shapes.items() if not _IN_LAYER.search(n)),
            linear_factors=linear,
            expert_factors=experts,
            critic=sum(math.prod(s) for n, s in of_critic.items() if n != "lm_head.weight"),
        )


def _factors(shapes: Mapping[str, Sequence[int]], lora: LoraConfig) -> tuple[int, int]:
    """The numbers of weights in the factors of linear layers and of experts. Models join the gate
    and up matrices of experts, which files have apart, so these share a factor."""
    linear, experts = 0, 0
    inputs: set[tuple[str, int]] = set()
    for name, shape in shapes.items():
        owner, _, kind = name.removesuffix(".weight").rpartition(".")
        is_matrix = len(shape) == 2 and name.endswith(".weight") and kind not in _ROUTERS
        is_joined = len(shape) == 3 and kind in ("gate_up_proj", "down_proj")
        if not _IN_LAYER.search(name) or not (is_matrix or is_joined):
            continue
        of_layer, is_expert, _ = owner.partition(".experts")
        kind = "gate_up_proj" if is_expert and kind in ("gate_proj", "up_proj") else kind
        layer = f".{of_layer}{is_expert}.{kind}"
        if not any(t == ALL_LINEAR or layer.endswith(f".{t}") for t in lora.target_modules):
            continue
        *num_experts, num_out, num_in = shape
        if not is_expert:
            linear += lora.rank * (num_out + num_in)
            continue
        num_in = 0 if (owner, num_in) in inputs else num_in
        inputs.add((owner, num_in))
        experts += math.prod(num_experts) * lora.rank * (num_out + num_in)
    return linear, experts


def rank_bytes(config: RunConfig, size: ModelSize, *, in_step: bool = True) -> int:
    """Bytes of one rank, at least: weights, gradients and the state of a built-in optimizer that is
    not offloaded, without activations. Gradients exist only within a step."""
    sizes, optimizer = config.trainer.mesh_sizes, config.optimizer
    state = 0 if optimizer.offload else _STATE_BYTES.get(optimizer.type, 0)
    trained = (8 if in_step else 4) + state
    shared, own = trained * (size.num_weights + size.critic), 0
    if config.lora is not None:
        num_adapters = 1 + len(config.adapter_policies)
        frozen = size.num_weights - size.num_outside
        frozen *= BITS / 8 if config.in_nf4 else frozen_dtype(config).itemsize
        factors = trained * num_adapters * size.expert_factors
        shared = int(frozen) + 4 * size.num_outside + factors + trained * size.critic
        own = trained * num_adapters * size.linear_factors // sizes.tp  # tp divides most of them
    return shared * sizes.dp_replicate // sizes.num_ranks + own


def kept_bytes(config: RunConfig) -> int:
    """What a rank keeps on the device of an engine that sleeps during its steps."""
    placement, sleeps = config.placement, config.cluster.share_gpu == "sleep"
    if not sleeps or config.spans_hosts or placement.engine(0) not in placement.trainer:
        return 0
    return rank_bytes(config, ModelSize.read(config), in_step=False)


def check_free_memory(
    config: RunConfig,
    device: torch.device,
    *,
    num_ranks: int = 1,
    patience_s: float = FREE_TIMEOUT_S,
) -> None:
    """Refuse the ranks of a device that do not fit into its free memory together, before one of
    them loads: each waits for the others first. The memory of a killed rank takes a while to be
    freed. Engines that sleep during a step give theirs back, so they do not count."""
    if device.type == "cuda" and config.cluster.share_gpu == "sleep":
        return
    needed = num_ranks * rank_bytes(config, ModelSize.read(config))
    deadline_s = time.monotonic() + patience_s
    while (memory := memory_of(device))[0] < needed and time.monotonic() < deadline_s:
        time.sleep(0.1)
    free, total = memory
    if needed > free:
        who = "A rank of the trainer needs"
        if num_ranks > 1:
            who = f"{num_ranks} ranks of the trainer need"
        raise ConfigError(
            f"{who} {needed / GIB:.1f} GiB for weights and optimizer state"
            f" alone, and {device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free; stop what"
            " else uses it, or use more ranks, optimizer.offload = true or a LoRA adapter."
        )


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that this process can still allocate, and all bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch has kept of freed tensors is not free for others, but is for this process.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept, total
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():  # not on Linux
        return page * total, page * total
    available = meminfo.read_text().partition("MemAvailable:")[2].split()[0]
    return int(available) * 1024, page * total
