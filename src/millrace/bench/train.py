"""`millrace bench train`: tokens per second and FLOP/s of the trainer's step, next to matmul's.

One packed microbatch of random rollouts, forward and backward; the optimizer's step is timed by
itself. FLOPs are those of the model: 6 per token and weight of its matrix products, those of causal
attention over each rollout's own length, and those of the head at trained tokens only. What is
computed twice to save memory counts once. The rate is compared with that of one large matrix
product in the same dtype, measured in the same run.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.bench import bench_parser, write_result
from millrace.bench.rank_processes import run_ranks
from millrace.bench.workloads import best_s, chosen_device, described, make_model, shapes
from millrace.core.mesh import MeshSizes
from millrace.core.microbatch import Batch
from millrace.core.records import Episode, Group, Rollout, Sampling, Task
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.logprobs import output_head
from millrace.models.sharding import shard
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.parallel.ranks import Ranks
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("train", on_device=True)
    parser.add_argument("--model", help=f"a shape ({', '.join(shapes())}) or a model directory")
    parser.add_argument("--tokens", type=int, help="of the microbatch (16384; on a CPU 1024)")
    parser.add_argument("--length", type=int, help="of each rollout (2048; on a CPU 128)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in backward")
    parser.add_argument("--no-compile", action="store_true", help="do not fuse layers")
    parser.add_argument("--ranks", type=int, default=1, help="that share the step with FSDP2 (1)")
    parser.add_argument("--sharded", action="store_true", help="one rank with the code of several")
    args = parser.parse_args(argv)
    device, dtype = chosen_device(args)
    threads = max(1, torch.get_num_threads() // args.ranks)
    if args.ranks == 1 and not args.sharded:
        result = measure(Ranks(), args, device, dtype)
    else:
        sizes = MeshSizes(dp_shard=args.ranks)
        options = {"device": device.type, "threads": threads, "sharded": True}
        result = run_ranks(measure, args, device, dtype, sizes=sizes, **options)
    for name, value in result.items():
        print(f"{name:<24}{value:,.3g}" if isinstance(value, float) else f"{name:<24}{value}")
    write_result(result, args.json)
    return 0


def measure(
    ranks: Ranks, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """`num_tokens` are those of all ranks together."""
    on_gpu = device.type == "cuda"
    name = args.model or ("qwen3-1.7b" if on_gpu else "tiny")
    num_tokens = args.tokens or (16384 if on_gpu else 1024)
    length = args.length or (2048 if on_gpu else 128)
    settings = {
        "gradient_checkpointing": args.checkpointing,
        "compile_layers": on_gpu and not args.no_compile,
    }
    model, _ = make_model(name, dtype=torch.float32, device=device, attention=PACKED_ATTENTION)
    if not ranks.is_alone:
        shard(model, root=model, mesh=ranks.fsdp_mesh)
    trainer = Trainer(
        PolicyModel(model, settings=TrainSettings(compute_dtype=dtype, **settings), ranks=ranks),
        loss=PolicyLoss(),
        schedule=Schedule(learning_rate=1e-6, total_steps=1000),
    )
    whole = _batch(num_tokens, length=length, vocab=model.config.vocab_size, num_ranks=args.ranks)
    flops = model_flops(model, whole)
    batch = whole.of_rank(ranks.data_rank)
    trainer.step(batch)  # compiles, and creates the optimizer state
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    pass_s = best_s(lambda: trainer.accumulate(batch), repeats=args.repeats, device=device)
    step_s = best_s(lambda: trainer.step(batch), repeats=args.repeats, device=device)
    rate = matmul_rate(device, dtype)
    return {
        "model": name,
        **described(device, dtype),
        "tokens": num_tokens,
        "length": length,
        "ranks": args.ranks,
        "microbatches": len(batch.microbatches),
        **settings,
        "tokens_per_s": num_tokens / pass_s,
        "forward_backward_s": pass_s,
        "step_s": step_s,
        "model_flops": float(flops),
        "flops_per_s": flops / pass_s,
        "matmul_flops_per_s": rate,
        "mfu": flops / pass_s / rate,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def model_flops(model: PreTrainedModel, batch: Batch) -> int:
    """FLOPs of one batch: 2 per multiply-add in the forward pass, twice that in the backward."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = output_head(model)
    layer_weights = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    head_weights = sum(parameter.numel() for parameter in head.parameters())
    total = 0
    for microbatch in batch.microbatches:
        lengths = microbatch.lengths.astype(np.int64)
        # Causal attention sees half of the L x L pairs; scores and values are two products.
        pairs = int((lengths * (lengths + 1)).sum()) // 2
        attention = 2 * pairs * config.num_attention_heads * head_dim * config.num_hidden_layers
        layers = layer_weights * len(microbatch.tokens)
        logits = head_weights * len(microbatch.targets)
        total += 6 * (layers + attention + logits)
    return total


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = best_s(lambda: left @ right, repeats=10, device=device)
    return 2 * size**3 / seconds


def _batch(num_tokens: int, *, length: int, vocab: int, num_ranks: int) -> Batch:
    """One microbatch for each rank, of rollouts without common prefixes."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 8
    groups = []
    for number in range(num_tokens // length):
        rollout = Rollout(
            tokens=rng.integers(3, vocab, length).astype(np.int32),
            mask=mask,
            engine_logprobs=np.where(mask, -np.log(vocab), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            sampling=Sampling(),
        )
        groups.append(
            Group(
                number=number,
                task=Task(prompt=""),
                episodes=(Episode(turns=(), rollouts=(rollout,)),),
                advantages=np.array([(-1.0) ** number], dtype=np.float32),
            )
        )
    return pack(groups, microbatch_tokens=num_tokens, num_ranks=num_ranks)
