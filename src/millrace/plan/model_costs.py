"""What a model costs: weights, KV, FLOPs and memory, and the times of the devices that run it.

Promise: read from config.json alone, so a plan needs neither the weights nor a GPU. GPUs are those
of the maker's documents; a CPU is measured (calibrate.py).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from millrace.config import RunConfig
from millrace.core.errors import ConfigError, suggestion
from millrace.core.microbatch import MeshSizes

GIB = 2**30
HOST_GPUS = 8  # per host; ranks and engines beyond it use the network
# What Millrace reaches on an H200 (docs/performance.md). Decode: the 1.7B shape at 64 and 256
# sequences is 66 % of its floor and 18 us per layer, the 135M shape 72 % and 36 us. Training: 459
# TFLOP/s of 989 at the 1.7B shape. Prefill was not measured by itself.
DECODE_SHARE, LAYER_S, TRAIN_MFU, PREFILL_MFU = 0.68, 25e-6, 0.46, 0.4
_ENGINE_MIB = 60.0  # of one more engine process on a CPU, without its weights
STEP_S, PUBLISH_S, SCORE_S = 0.01, 0.02, 0.01  # per step, version and group: assumptions

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Gpu:
    """Peaks are dense bfloat16 with float32 accumulation. Links are per direction."""

    memory_gb: float
    tflops: float
    gb_per_s: float  # of its memory
    link: float  # GB/s to a GPU of the same host
    network: float  # GB/s to a GPU of another host; an assumption
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
GPUS = {
    "a100": Gpu(80, 312, 2039, 300, 25, f"{_NVIDIA}/a100/ (SXM, 80 GB)"),
    "a100-40gb": Gpu(40, 312, 1555, 300, 25, f"{_NVIDIA}/a100/ (SXM, 40 GB)"),
    "h100": Gpu(80, 989, 3350, 450, 50, f"{_NVIDIA}/h100/ (SXM)"),
    "h100-pcie": Gpu(80, 756, 2000, 64, 50, f"{_NVIDIA}/h100/ (PCIe)"),
    "h200": Gpu(141, 989, 4800, 450, 50, f"{_NVIDIA}/h200/ (SXM)"),
    "b200": Gpu(180, 2250, 8000, 900, 50, f"{_NVIDIA}/dgx-b200/ (an eighth of a DGX B200)"),
    "l40s": Gpu(48, 362, 864, 32, 25, f"{_NVIDIA}/l40s/"),
    "l4": Gpu(24, 121, 300, 32, 12.5, f"{_NVIDIA}/l4/"),
    "rtx3090": Gpu(24, 71, 936, 16, 1.25, "NVIDIA Ampere GA102 GPU Architecture, 2021"),
    "rtx4090": Gpu(24, 165, 1008, 32, 1.25, "NVIDIA Ada GPU Architecture, 2023"),
    "rtx5090": Gpu(32, 209, 1792, 64, 1.25, "NVIDIA RTX Blackwell GPU Architecture, 2025"),
}


def gpu_named(name: str) -> Gpu:
    if (found := GPUS.get(name.lower())) is None:
        hint = suggestion(name.lower(), GPUS, otherwise="there are")
        raise ConfigError(f"--gpu {name!r} is not in the table; {hint}")
    return found


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # of a dense layer, or of one expert
    vocab: int
    experts: int = 0  # 0 = dense
    experts_used: int = 0  # per token
    shared_mlp: int = 0  # of experts that every token uses
    is_tied: bool = False  # input and output embeddings are one matrix

    @classmethod
    def of_config(cls, table: Mapping[str, Any], *, path: str = "config.json") -> Self:
        table = table.get("text_config", table)
        experts = next((int(table[key]) for key in _EXPERTS if table.get(key)), 0)
        has_own = experts and table.get("moe_intermediate_size")
        mlp_size = "moe_intermediate_size" if has_own else "intermediate_size"
        if missing := [k for k in (*_NEEDED, mlp_size) if not isinstance(table.get(k), int)]:
            raise ConfigError(f"{path} has no {missing[0]!r}; a plan cannot tell the model's size.")
        heads, hidden, mlp = (table[k] for k in ("num_attention_heads", "hidden_size", mlp_size))
        shared_mlp = table.get("shared_expert_intermediate_size")
        return cls(
            layers=table["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=table.get("num_key_value_heads") or heads,
            head_dim=table.get("head_dim") or hidden // heads,
            mlp=mlp,
            vocab=table["vocab_size"],
            experts=experts,
            experts_used=table.get("num_experts_per_tok") or 0,
            shared_mlp=shared_mlp or (table.get("n_shared_experts") or 0) * mlp,
            is_tied=bool(table.get("tie_word_embeddings", False)),
        )

    @classmethod
    def read(cls, path: str) -> Self:
        """The shape of a model in a directory or on the hub."""
        file = Path(path) / "config.json"
        if not file.is_file():
            from millrace.models.directory import text_config  # imports transformers

            return cls.of_config(text_config(path).to_dict(), path=path)
        try:
            return cls.of_config(json.loads(file.read_text()), path=str(file))
        except ValueError as error:
            raise ConfigError(f"{file} is not a model's configuration: {error}.") from None

    def layer_weights(self, experts: float) -> float:
        """The weights of one layer, with so many of its experts."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * (self.mlp * (experts if self.experts else 1) + self.shared_mlp)
        return attention + mlp + self.hidden * (2 + self.experts)

    @property
    def num_weights(self) -> int:
        layers = int(self.layers * self.layer_weights(self.experts))
        return layers + self.table_weights + self.hidden

    def read_weights(self, num_tokens: float) -> float:
        """The number of weights that a forward pass of so many tokens multiplies with: it skips
        experts that no token uses, and looks the input embedding up."""
        unused = (1 - self.experts_used / self.experts) ** num_tokens if self.experts else 0.0
        layer = self.layer_weights(self.experts * (1 - unused))
        return self.layers * layer + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """The KV of one token, in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def table_weights(self) -> int:
        """The weights of embeddings and head."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2)

    def adapter_weights(self, rank: int) -> tuple[int, int]:
        """The weights of a LoRA adapter of all linear layers: their factors, and those of experts,
        whose gate and up matrices share one."""
        attention = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)
        dense = self.shared_mlp if self.experts else self.mlp
        linear = attention + (3 * (self.hidden + dense) if dense else 0)
        experts = self.experts * (2 * self.hidden + 3 * self.mlp)
        return rank * self.layers * linear, rank * self.layers * experts

    def forward_flops(self, tokens: float, pairs: float) -> float:
        """`pairs`: of a token and one that it attends to, summed over all tokens."""
        attention = 4 * pairs * self.heads * self.head_dim * self.layers
        return 2 * tokens * self.read_weights(1) + attention

    def activation_bytes(self, *, checkpointing: bool, tp: int = 1) -> int:
        """What one token keeps for the backward pass, in 16 bits. The terms of a layer reproduce
        the peaks of docs/performance.md (1.7B and 8B). `tp` divides what is inside of an MLP."""
        mlp = self.mlp * max(self.experts_used, 1) + self.shared_mlp
        layer = 2 * (7 * self.hidden + 4 * mlp // tp)
        return layer + 2 * self.layers * self.hidden if checkpointing else self.layers * layer


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """Seconds of one model on GPUs of one kind."""

    shape: ModelShape
    gpu: Gpu
    tp: int = 1  # GPUs that hold an engine
    ranks: int = 1
    mesh: MeshSizes = field(default_factory=MeshSizes)  # its cp, tp and ep
    microbatch_tokens: int = 8192
    recomputes: bool = False  # gradient checkpointing
    update_bytes: int | None = None  # of one version; None = all weights in 16 bits
    num_gpus: int = 1  # of the run
    train_scale: int = 1  # work of a real step over that of a simulated one
    score_s: float = SCORE_S
    device: ClassVar[str] = "cuda"
    first_s: ClassVar[float] = 0.0  # not measured by itself
    admit_s: ClassVar[float] = 0.0
    start_s: ClassVar[float] = 0.0

    def decode_s(self, num_sequences: int, context_tokens: float) -> float:
        """One step of a batch whose sequences have so many tokens together: the floor is reading
        weights and KV once, or computing, whichever takes longer."""
        shape, gpu = self.shape, self.gpu
        read = 2 * shape.read_weights(num_sequences) + context_tokens * shape.kv_bytes
        flops = shape.forward_flops(num_sequences, context_tokens)
        floor_s = max(read / (gpu.gb_per_s * 1e9), flops / (gpu.tflops * 1e12)) / self.tp
        return shape.layers * LAYER_S + floor_s / DECODE_SHARE

    def prefill_s(self, tokens: float) -> float:
        flops = self.shape.forward_flops(tokens, tokens**2 / 2)
        return flops / (self.gpu.tflops * 1e12 * self.tp * PREFILL_MFU)

    def train_s(self, tokens: float, pairs: float) -> float:
        """One optimizer step; FSDP moves weights while it computes. Each sum over tp and each
        exchange over cp or ep moves hidden states of all layers before the ranks compute on."""
        shape, mesh, tokens = self.shape, self.mesh, tokens * self.train_scale
        # Recomputation is not part of MFU, so it lengthens the step by a third.
        flops = shape.forward_flops(tokens, pairs * self.train_scale)
        flops *= 4 if self.recomputes else 3
        compute_s = flops / (self.ranks * self.gpu.tflops * 1e12 * TRAIN_MFU)
        rows = tokens * mesh.tp / self.ranks  # of one rank; those of a tp group are the same
        passes = max(1.0, rows / self.microbatch_tokens)
        own, every = (shape.layer_weights(shape.experts / parts) for parts in (mesh.ep, 1))
        gathered = (shape.num_weights - shape.layers * (every - own)) / mesh.tp
        moved = 6 * gathered * (1 - 1 / self.ranks) * passes
        hidden = 2 * (1 - 1 / mesh.tp) + (1 - 1 / mesh.cp)  # a sum moves everything twice
        hidden += shape.experts_used * (1 - 1 / mesh.ep) / mesh.tp
        # Two in the forward pass, two in the backward pass, and two to recompute.
        hidden *= rows * 2 * shape.hidden * shape.layers * (6 if self.recomputes else 4)
        hidden_s = hidden / self._link(HOST_GPUS)  # these groups are within a host
        optimizer = 32 * shape.num_weights / self.ranks  # bytes read and written
        optimizer_s = optimizer / (self.gpu.gb_per_s * 1e9)
        return STEP_S + max(compute_s, moved / self._link(self.ranks)) + hidden_s + optimizer_s

    @property
    def publish_s(self) -> float:
        """The time from the end of a step until engines can swap; they decode meanwhile."""
        return PUBLISH_S + self._moved_bytes / self._link(self.num_gpus)

    @property
    def swap_s(self) -> float:
        """The time for which an engine stands still: that of a copy within its memory."""
        return 2 * self._moved_bytes / self.tp / (self.gpu.gb_per_s * 1e9)

    @property
    def _moved_bytes(self) -> int:
        return self.update_bytes or 2 * self.shape.num_weights

    def _link(self, num_gpus: int) -> float:
        gpu = self.gpu
        return 1e9 * (gpu.link if num_gpus <= HOST_GPUS else gpu.network)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured seconds of one model on this machine: on its CPU cores, or on one GPU that engine
    and trainer share."""

    shape: Mapping[str, Any]
    num_cores: int
    device: str = "cpu"  # or "cuda"
    decode_step_s: float  # whatever the batch
    sequence_s: float  # per decode step
    first_s: float  # of a pass that starts sequences on an idle engine, whatever their number
    admit_s: float  # of one that starts sequences beside others
    start_s: float  # per sequence
    train_step_s: float  # whatever the batch
    microbatch_s: float
    train_token_s: float
    publish_s: float  # from the end of a step until engines have its weights
    score_s: float  # per group
    engine_slowdown: float = 1.0  # while the trainer works
    trainer_slowdown: float = 1.0  # while an engine works
    base_mib: float = 0.0  # of all processes, for a step of few tokens
    token_mib: float = 0.0  # per token of a microbatch
    microbatch_tokens: int = 8192
    swap_s: ClassVar[float] = 0.0  # part of publish_s

    def decode_s(self, num_sequences: int, context_tokens: float) -> float:
        return self.decode_step_s + num_sequences * self.sequence_s

    def prefill_s(self, tokens: float) -> float:
        return 0.0  # part of first_s, admit_s and start_s

    def train_s(self, tokens: float, pairs: float) -> float:
        microbatches = math.ceil(tokens / self.microbatch_tokens)
        return self.train_step_s + microbatches * self.microbatch_s + tokens * self.train_token_s

    def speed(self, worker: str, num_busy: int, *, threads: int) -> float:
        """The speed of a worker beside others with so many threads each, relative to one alone. It
        is lower while others work, even with cores for each."""
        slowdown = self.trainer_slowdown if worker == "trainer" else self.engine_slowdown
        return min(1.0, self.num_cores / (num_busy * threads)) / slowdown

    def run_mib(self, config: RunConfig, shape: ModelShape, *, tokens: float) -> float:
        """The memory of all processes. `tokens`: of a microbatch."""
        engine_mib = _ENGINE_MIB + shape.num_weights * 4 / 2**20
        more_mib = (config.engine.num_local - 1) * engine_mib
        return self.base_mib + tokens * self.token_mib + more_mib


Costs = DeviceCosts | Calibration
