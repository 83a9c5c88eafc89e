"""One long sequence, first generated, then trained: tokens per second and peak memory of each half.

    python benchmarks/long_sequences.py --model qwen3-1.7b --tokens 131072 --json long.json

The embedded engine generates the tokens after a short prompt. Then the engine is gone, and the
trainer computes one step on the sequence, with recomputed layers; `--lora`, `--optimizer` and
`--offload` save more memory. The step that is timed is the second one: the first compiles and
creates the optimizer state. Peaks are those of the GPU; a CPU has none.

The model has random weights, the same in both halves, and as many positions as the sequence needs,
by YaRN. `logprob_mismatch` is the mean absolute difference between the logprobs of engine and
trainer: it would be large if one of them computed late positions wrongly.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_words import word_tokenizer

from millrace.bench import show_result
from millrace.bench.train import make_policy, weights_dtype
from millrace.bench.workloads import (
    best_s,
    chosen_device,
    described,
    group_of,
    make_model,
    shape_named,
    shapes,
)
from millrace.config import EngineConfig
from millrace.config.training import ADAMW, ADAMW_8BIT, MUON
from millrace.core.microbatch import Batch
from millrace.core.records import Completion, Request, Sampling
from millrace.environments.token_record import rollout_of
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help=f"{', '.join(shapes())} (qwen3-1.7b; on a CPU tiny)")
    parser.add_argument("--tokens", type=int, help="of the sequence (131072; on a CPU 4096)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of these (64)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of all layers")
    parser.add_argument("--optimizer", default=ADAMW, help=f"{ADAMW}, {MUON} or {ADAMW_8BIT}")
    parser.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16; CPU float32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    args = parser.parse_args(argv)
    device, dtype = chosen_device(args)
    on_gpu = device.type == "cuda"
    args.model = args.model or ("qwen3-1.7b" if on_gpu else "tiny")
    args.tokens = args.tokens or (131072 if on_gpu else 4096)
    if not 0 < args.prompt_tokens < args.tokens:
        parser.error(f"--prompt-tokens {args.prompt_tokens} is not within 1..{args.tokens - 1}")
    shape_named(args.model)  # a model directory would keep its own positions
    prompt, completion, generated = generate(args, device=device, dtype=dtype)
    gc.collect()  # the engine has cycles
    if on_gpu:
        torch.compiler.reset()
        torch.cuda.empty_cache()
    trained = train(_batch(prompt, completion), args, device=device, dtype=dtype)
    sizes = {"tokens": args.tokens, "prompt_tokens": args.prompt_tokens}
    memory = {"lora": args.lora, "optimizer": args.optimizer, "offload": args.offload}
    about = {"model": args.model, **described(device, dtype), **sizes, **memory}
    show_result({**about, **generated, **trained}, args.json)
    return 0


def generate(
    args: argparse.Namespace, *, device: torch.device, dtype: torch.dtype
) -> tuple[np.ndarray, Completion, dict[str, Any]]:
    """The prompt, the completion, and what it took; the prefill of the prompt is included."""
    engine = make_engine(args, device=device, dtype=dtype)
    _reset_peak(device)
    prompt = np.random.default_rng(0).integers(3, 1000, args.prompt_tokens).astype(np.int32)
    num_new = args.tokens - args.prompt_tokens
    engine.add_request(Request(id="long", prompt=prompt, sampling=Sampling(max_new_tokens=num_new)))
    before_s, finished = time.perf_counter(), []
    while engine.has_work:
        finished += engine.step()
    seconds = time.perf_counter() - before_s
    completion: Completion = finished[0].completions[0]
    assert len(completion.tokens) == num_new, "the model cannot sample the eos token"
    measured = {
        "generate_s": seconds,
        "generated_tokens_per_s": num_new / seconds,
        "generate_peak_bytes": _peak_bytes(device),
    }
    return prompt, completion, measured


def make_engine(
    args: argparse.Namespace, *, device: torch.device, dtype: torch.dtype
) -> EmbeddedEngine:
    """An engine for one sequence. Its weights are those of the trainer, rounded to `dtype`: numbers
    that are drawn in another dtype are others."""
    model, _ = make_model(
        args.model,
        dtype=weights_dtype(dtype, lora_rank=args.lora),
        device=device,
        attention=engine_path(device),
        num_positions=args.tokens,
    )
    for parameter in model.parameters():  # to() would round the frequencies of the positions, too
        parameter.data = parameter.data.to(dtype)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    tokenizer = word_tokenizer(model.config.get_text_config().vocab_size, ends=False)
    config = EngineConfig(max_sequences=1, max_context=args.tokens)
    return engine_of(model, tokenizer, config=config, version=0)


def train(
    batch: Batch, args: argparse.Namespace, *, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    _reset_peak(device)
    settings = TrainSettings(
        compute_dtype=dtype,
        optimizer=args.optimizer,
        offload_optimizer=args.offload,
        gradient_checkpointing=True,
        compile_layers=device.type == "cuda",
    )
    where = {"device": device, "ranks": Ranks(), "num_positions": args.tokens}
    policy = make_policy(args.model, settings, lora_rank=args.lora, **where)
    schedule = Schedule(learning_rate=1e-6, total_steps=1000)
    trainer = Trainer(policy, loss=PolicyLoss(), schedule=schedule)
    first = trainer.step(batch)
    step_s = best_s(lambda: trainer.step(batch), repeats=1, device=device)
    return {
        "train_step_s": step_s,
        "trained_tokens_per_s": args.tokens / step_s,
        "train_peak_bytes": _peak_bytes(device),
        "logprob_mismatch": first["mismatch/logprob"],
    }


def _batch(prompt: np.ndarray, completion: Completion) -> Batch:
    rollout = rollout_of(prompt, completion, Sampling())
    group = group_of(0, [rollout], np.ones(1))
    return pack([group], microbatch_tokens=len(rollout.tokens))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


if __name__ == "__main__":
    sys.exit(main())
