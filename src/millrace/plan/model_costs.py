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
# Shares of the maker's numbers that Millrace reached on an H200 (docs/performance.md).
# Decoding ("Generation", layers of Millrace's own kernels, 64 prompt and 512 new tokens): 68,538
# tokens/s of SmolLM2-135M and 28,653 of Qwen3-1.7B with 64 sequences, 11,229 and 22,691 of Qwen3-8B
# with 64 and 256; all four are met to 5 %. Of the first two with 256 sequences and of Qwen3-30B-A3B
# there are only the lower rates of an earlier version, and no prediction is above them.
DECODE_SHARE, DECODE_MFU = 0.74, 0.56  # of bandwidth; of the peak where computing takes longer
LAYER_S, SEQUENCE_S = 19e-6, 2.4e-6  # per decode step: of a layer, and of a sequence (sampling)
# Prefill ("FP8"): 39,636 tokens/s of Qwen3-8B with prompts of 64 tokens, 70 % of the rate of a
# large matrix product. Training: 42,546 tokens/s of Qwen3-1.7B with rollouts of 2,048 tokens, and
# 16,328 with one of 32,768, half of whose FLOPs are attention. The share of attention is that of
# forward and backward pass together; in prefill it was not measured by itself.
PREFILL_MFU, TRAIN_MFU, ATTENTION_MFU = 0.55, 0.49, 0.29
# A mixture of experts ("Training"): 9,310 tokens/s of Qwen3-30B-A3B with an adapter and recomputed
# layers. Its prefill was not measured, and is assumed to be no better.
MIXTURE_MFU = 0.19
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
        return self.layers * layer + self.vocab_weights

    @property
    def kv_bytes(self) -> int:
        """The KV of one token, in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def vocab_weights(self) -> int:
        """The weights of the head, or of the embeddings."""
        return self.vocab * self.hidden

    @property
    def table_weights(self) -> int:
        """The weights of embeddings and head."""
        return self.vocab_weights * (1 if self.is_tied else 2)

    def adapter_weights(self, rank: int) -> tuple[int, int]:
        """The weights of a LoRA adapter of all linear layers: their factors, and those of experts,
        whose gate and up matrices share one."""
        attention = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)
        dense = self.shared_mlp if self.experts else self.mlp
        linear = attention + (3 * (self.hidden + dense) if dense else 0)
        experts = self.experts * (2 * self.hidden + 3 * self.mlp)
        return rank * self.layers * linear, rank * self.layers * experts

    def product_flops(self, tokens: float, *, logits: float | None = None) -> float:
        """Of a forward pass without attention. `logits`: tokens that get them; None = all."""
        layers = self.layers * self.layer_weights(self.experts_used)
        return 2 * (tokens * layers + (tokens if logits is None else logits) * self.vocab_weights)

    def attention_flops(self, pairs: float) -> float:
        """Of a forward pass. `pairs`: of a token and one that it attends to, over all tokens."""
        return 4 * pairs * self.heads * self.head_dim * self.layers

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
    # Its dp_replicate, cp, tp and ep; the other ranks shard.
    mesh: MeshSizes = field(default_factory=MeshSizes)
    microbatch_tokens: int = 8192
    minibatches: int = 1
    epochs: int = 1
    recomputes: bool = False  # gradient checkpointing
    adapter_weights: int | None = None  # that are trained; None = all weights of the model
    update_bytes: int | None = None  # of one version; None = all weights in 16 bits
    num_gpus: int = 1  # of the run
    train_scale: int = 1  # work of a real step over that of a simulated one
    score_s: float = SCORE_S
    device: ClassVar[str] = "cuda"
    first_s: ClassVar[float] = 0.0  # not measured by itself
    admit_s: ClassVar[float] = 0.0
    start_s: ClassVar[float] = 0.0

    def decode_s(self, num_sequences: int, context_tokens: float) -> float:
        """One step of a batch whose sequences have so many tokens together: products read their
        weights or compute, whichever takes longer, and attention reads the KV."""
        shape, bandwidth = self.shape, self.gpu.gb_per_s * 1e9 * DECODE_SHARE
        read_s = 2 * shape.read_weights(num_sequences) / bandwidth
        compute_s = shape.product_flops(num_sequences) / (self.gpu.tflops * 1e12 * DECODE_MFU)
        kv_s = context_tokens * shape.kv_bytes / bandwidth
        overhead_s = shape.layers * LAYER_S + num_sequences * SEQUENCE_S
        return overhead_s + (max(read_s, compute_s) + kv_s) / self.tp

    def prefill_s(self, tokens: float) -> float:
        """Of one sequence."""
        shape, mfu = self.shape, MIXTURE_MFU if self.shape.experts else PREFILL_MFU
        products = shape.product_flops(tokens, logits=1) / mfu
        attention = shape.attention_flops(tokens**2 / 2) / ATTENTION_MFU
        return (products + attention) / (self.gpu.tflops * 1e12 * self.tp)

    def train_s(self, tokens: float, pairs: float) -> float:
        """One step; FSDP moves weights while it computes. Each sum over tp and each exchange over
        cp or ep moves hidden states of all layers before the ranks compute on."""
        shape, mesh = self.shape, self.mesh
        tokens, pairs = tokens * self.train_scale, pairs * self.train_scale
        compute_s = self._compute_s(tokens, pairs)
        rows = tokens * mesh.tp / self.ranks  # of one rank; those of a tp group are the same
        moved_s = max(self.minibatches, rows / self.microbatch_tokens) * self._moved_s
        hidden = 2 * (1 - 1 / mesh.tp) + (1 - 1 / mesh.cp)  # a sum moves everything twice
        hidden += shape.experts_used * (1 - 1 / mesh.ep) / mesh.tp
        # Two in the forward pass, two in the backward pass, and two to recompute.
        hidden *= rows * 2 * shape.hidden * shape.layers * (6 if self.recomputes else 4)
        hidden_s = hidden / self._link(HOST_GPUS)  # these groups are within a host
        trained = shape.num_weights if self.adapter_weights is None else self.adapter_weights
        optimizer = 32 * trained * mesh.dp_replicate / self.ranks  # bytes read and written
        optimizer_s = self.minibatches * optimizer / (self.gpu.gb_per_s * 1e9)
        return STEP_S + self.epochs * (max(compute_s, moved_s) + hidden_s + optimizer_s)

    def _compute_s(self, tokens: float, pairs: float) -> float:
        """One pass over a step. Besides the forward pass, products compute gradients of inputs and
        of trained weights, and recomputation is another forward pass, which is no part of MFU."""
        products = (3 if self.adapter_weights is None else 2) + self.recomputes
        mfu = MIXTURE_MFU if self.shape.experts else TRAIN_MFU
        flops = products * self.shape.product_flops(tokens) / mfu
        flops += (3 + self.recomputes) * self.shape.attention_flops(pairs) / ATTENTION_MFU
        return flops / (self.ranks * self.gpu.tflops * 1e12)

    @property
    def _moved_s(self) -> float:
        """What FSDP moves in one microbatch: weights in 16 bits for both passes, and gradients in
        float32, which copies of the model (dp_replicate) sum over their hosts as well."""
        shape, mesh = self.shape, self.mesh
        own, every = (shape.layer_weights(shape.experts / parts) for parts in (mesh.ep, 1))
        gathered = (shape.num_weights - shape.layers * (every - own)) / mesh.tp
        gradient_bytes = 4 * gathered if self.adapter_weights is None else 0.0  # else they are few
        shards = self.ranks // (mesh.dp_replicate * mesh.tp)
        moved_s = (4 * gathered + gradient_bytes) * (1 - 1 / shards) / self._link(shards * mesh.tp)
        summed = 2 * gradient_bytes / shards * (1 - 1 / mesh.dp_replicate)
        return moved_s + summed / self._link(self.ranks)

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
