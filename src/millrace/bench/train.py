"""`millrace bench train`: tokens per second and FLOP/s of the trainer's step, next to matmul's.

One packed microbatch of random rollouts, forward and backward; the optimizer's step is timed by
itself. FLOPs are those of the model: 6 per token and weight of its matrix products, or 4 where the
weight is frozen; those of causal attention over each rollout's own length; and those of the head at
trained tokens only. A token uses a few of the experts, and only these count. What is computed twice
to save memory counts once. The rate is compared with that of one large matrix product in the same
dtype, measured in the same run; so is the rate of the grouped products of a mixture of experts.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace.bench import bench_parser, show_result
from millrace.bench.rank_processes import run_ranks
from millrace.bench.workloads import (
    best_s,
    chosen_device,
    completion_of,
    described,
    group_of,
    kernel_times,
    make_model,
    shapes,
)
from millrace.config import LoraConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.microbatch import Batch, MeshSizes
from millrace.core.records import Sampling
from millrace.environments.token_record import rollout_of
from millrace.models.attention.packed import PACKED
from millrace.models.directory import num_experts
from millrace.models.logprobs import output_head
from millrace.models.lora.factors import EXPERT_WEIGHTS, expert_modules, grouped
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.sharding import local_part, shard
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
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of all layers")
    parser.add_argument("--optimizer", default=ADAMW, help=f"{ADAMW}, {MUON} or {ADAMW_8BIT}")
    parser.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    parser.add_argument("--ranks", type=int, default=1, help="that share the step with FSDP2 (1)")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each microbatch (1)")
    parser.add_argument("--sharded", action="store_true", help="one rank with the code of several")
    parser.add_argument("--profile", action="store_true", help="list what the GPU's time went to")
    args = parser.parse_args(argv)
    device, dtype = chosen_device(args)
    threads = max(1, torch.get_num_threads() // args.ranks)
    if args.ranks == 1 and not args.sharded:
        result = measure(Ranks(), args, device, dtype)
    else:
        sizes = MeshSizes(dp_shard=args.ranks // args.cp, cp=args.cp)
        options = {"device": device.type, "threads": threads, "sharded": True}
        result = run_ranks(measure, args, device, dtype, sizes=sizes, **options)
    show_result(result, args.json)
    return 0


def measure(
    ranks: Ranks, args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """`num_tokens` are those of all ranks together."""
    on_gpu = device.type == "cuda"
    name = args.model or ("qwen3-1.7b" if on_gpu else "tiny")
    num_tokens = args.tokens or (16384 if on_gpu else 1024)
    length = args.length or (2048 if on_gpu else 128)
    settings = TrainSettings(
        compute_dtype=dtype,
        optimizer=args.optimizer,
        offload_optimizer=args.offload,
        gradient_checkpointing=args.checkpointing,
        compile_layers=on_gpu and not args.no_compile,
        exact=args.exact,
    )
    policy = make_policy(name, settings, lora_rank=args.lora, device=device, ranks=ranks)
    model = policy.module
    schedule = Schedule(learning_rate=1e-6, total_steps=1000)
    trainer = Trainer(policy, loss=PolicyLoss(), schedule=schedule)
    num_shares = ranks.sizes.num_data_ranks
    whole = _batch(num_tokens, length=length, vocab=model.config.vocab_size, num_ranks=num_shares)
    flops = model_flops(model, whole)
    batch = whole.of_rank(ranks.data_rank)
    trainer.step(batch)  # compiles, and creates the optimizer state
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    pass_s = best_s(lambda: trainer.accumulate(batch), repeats=args.repeats, device=device)
    step_s = best_s(lambda: trainer.step(batch), repeats=args.repeats, device=device)
    if args.profile and on_gpu:
        print(kernel_times(lambda: trainer.step(batch), num_steps=1))
    rate = matmul_rate(device, dtype)
    experts = expert_modules(model)
    return {
        "model": name,
        **described(device, dtype),
        "tokens": num_tokens,
        "length": length,
        "ranks": args.ranks,
        "cp": args.cp,
        "microbatches": len(batch.microbatches),
        "lora": args.lora,
        "optimizer": args.optimizer,
        "offload": args.offload,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "compile_layers": settings.compile_layers,
        "tokens_per_s": num_tokens / pass_s,
        "forward_backward_s": pass_s,
        "step_s": step_s,
        "model_flops": float(flops),
        "flops_per_s": flops / pass_s,
        "matmul_flops_per_s": rate,
        "mfu": flops / pass_s / rate,
        "grouped_share": grouped_rate(model, num_tokens, dtype=dtype) / rate if experts else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "activation_bytes": None if on_gpu else activation_bytes(trainer, batch),
    }


def weights_dtype(compute_dtype: torch.dtype, *, lora_rank: int | None) -> torch.dtype:
    """Of the model's weights in training: frozen ones are in 16 bits."""
    is_half = lora_rank and compute_dtype is torch.bfloat16
    return torch.bfloat16 if is_half else torch.float32


def make_policy(
    name: str,
    settings: TrainSettings,
    *,
    lora_rank: int | None,
    device: torch.device,
    ranks: Ranks,
    num_positions: int = 0,
) -> PolicyModel:
    """The model as build_policy() makes it. A shape gets at least `num_positions`."""
    dtype = weights_dtype(settings.compute_dtype, lora_rank=lora_rank)
    sizes = {"num_positions": num_positions}
    model, _ = make_model(name, dtype=dtype, device=device, attention=PACKED, **sizes)
    if not ranks.is_alone:
        shard(model, root=model, meshes=ranks.sharding_meshes, dtype=settings.compute_dtype)
    lora = LoraConfig(rank=lora_rank) if lora_rank else None
    adapter = lora and TrainedAdapter(model, lora, model_path=name)
    return PolicyModel(model, settings=settings, adapter=adapter, ranks=ranks)


def activation_bytes(trainer: Trainer, batch: Batch) -> int:
    """Bytes that one rank keeps between the forward and the backward pass of a microbatch, without
    weights."""
    found: dict[int, int] = {}  # by address

    def count(saved: torch.Tensor) -> torch.Tensor:
        weights = {local_part(p).data_ptr() for p in trainer.policy.module.parameters()}
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    first = replace(batch, microbatches=batch.microbatches[:1])
    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        trainer.accumulate(first)
    return sum(found.values())


def model_flops(model: PreTrainedModel, batch: Batch) -> int:
    """FLOPs of one batch: 2 per multiply-add in the forward pass, as many in the backward pass for
    the gradient of the input, and as many again for that of a weight that is trained."""
    return sum(
        flops_of(model, microbatch.lengths, num_targets=len(microbatch.targets), passes=3)
        for microbatch in batch.microbatches
    )


def flops_of(
    model: PreTrainedModel, lengths: np.ndarray, *, num_targets: int, passes: int = 1
) -> int:
    """FLOPs of sequences of these lengths with logits at `num_targets` tokens. `passes`: 1 is the
    forward pass alone; 3 adds the gradients of inputs and of weights that are trained."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head, embeddings = output_head(model), model.get_input_embeddings()
    not_layers = {*head.parameters(), *embeddings.parameters()}
    share = config.num_experts_per_tok / num_experts(config) if num_experts(config) else 1

    def of_row(weight: torch.nn.Parameter) -> int:
        return 2 * weight.numel() * (passes if weight.requires_grad else min(passes, 2))

    per_token = sum(
        of_row(p) * (share if p.ndim == 3 else 1)
        for p in model.parameters()
        if p.ndim > 1 and p not in not_layers
    )
    per_target = sum(of_row(p) for p in head.parameters())
    lengths = lengths.astype(np.int64)
    # Causal attention sees half of the L x L pairs; scores and values are two products.
    pairs = int((lengths * (lengths + 1)).sum()) // 2
    attention = 4 * passes * pairs * config.num_attention_heads * head_dim
    attention *= config.num_hidden_layers
    return attention + int(per_token * lengths.sum()) + per_target * num_targets


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = best_s(lambda: left @ right, repeats=10, device=device)
    return 2 * size**3 / seconds


def grouped_rate(model: PreTrainedModel, num_tokens: int, *, dtype: torch.dtype) -> float:
    """FLOP/s of the grouped products of one layer's experts with tokens that are routed at random,
    forward and backward to the input."""
    module: Any = next(iter(expert_modules(model).values()))
    rows = num_tokens * model.config.get_text_config().num_experts_per_tok
    chosen = torch.randint(module.num_experts, (rows,), device=model.device)
    counts = torch.bincount(chosen, minlength=module.num_experts)
    offsets = counts.cumsum(0, dtype=torch.int32)
    seconds = flops = 0.0
    for name in EXPERT_WEIGHTS:
        weight = getattr(module, name).detach().to(dtype)  # [E, O, I]
        x = torch.randn(rows, weight.shape[2], dtype=dtype, device=model.device).requires_grad_()
        grad = torch.randn(rows, weight.shape[1], dtype=dtype, device=model.device)

        def both(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            grouped(x, weight, offsets).backward(grad)

        seconds += best_s(both, repeats=10, device=model.device)
        flops += 4 * rows * weight[0].numel()
    return flops / seconds


def _batch(num_tokens: int, *, length: int, vocab: int, num_ranks: int) -> Batch:
    """One microbatch for each rank, of rollouts without common prefixes."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_tokens // length):
        prompt, sampled = np.split(rng.integers(3, vocab, length), [length // 8])
        completion = completion_of(sampled, np.full(len(sampled), -np.log(vocab)))
        rollout = rollout_of(prompt, completion, Sampling())
        groups.append(group_of(number, [rollout], np.array([(-1.0) ** number])))
    return pack(groups, microbatch_tokens=num_tokens, num_ranks=num_ranks)
