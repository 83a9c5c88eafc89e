"""`millrace bench fidelity`: logprobs that differ between engine and trainer, bit by bit.

The engine samples groups of completions with few KV blocks and short prefill chunks, so that
prompts are prefilled in parts, prefixes are reused and sequences are preempted; some requests
truncate their distribution. The trainer computes the logprobs of the same tokens, packed with
shared prompts into microbatches of several sizes. Both have the same weights, of which engines get
those rounded to the compute dtype.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch

from millrace.bench import bench_parser, show_result
from millrace.bench.workloads import chosen_device, described, group_of, make_model, shapes
from millrace.config import EngineConfig
from millrace.core.records import Completion, Group, Request, Sampling
from millrace.environments.token_record import rollout_of
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.cache import block_bytes
from millrace.inference.embedded.kv.paged_attention import measure_cache
from millrace.inference.embedded.self_test import engine_path
from millrace.models.attention.packed import PACKED
from millrace.models.routing import RouteReplay, find_routing
from millrace.training.metrics import replayed_rows
from millrace.training.optimizer import TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.policy_model import PolicyModel

_GROUP = 4  # completions of a prompt
_BLOCK_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("fidelity", on_device=True)
    parser.add_argument("--model", help=f"a shape ({', '.join(shapes())}) or a model directory")
    parser.add_argument("--mode", choices=["exact", "fast"], default="exact")
    parser.add_argument("--tokens", type=int, help="to compare (1,000,000; on a CPU 20,000)")
    parser.add_argument("--batch", type=int, help="sequences decoded together (256; on a CPU 16)")
    parser.add_argument("--new-tokens", type=int, help="of each completion (256; on a CPU 64)")
    parser.add_argument("--decode-steps", type=int, help="decode steps per launch on the device")
    parser.add_argument(
        "--routes", action="store_true", help="replay the recorded routes of a mixture of experts"
    )
    args = parser.parse_args(argv)
    result = measure(args)
    show_result(result, args.json)
    return int(args.mode == "exact" and result["differing"] > 0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = chosen_device(args)
    on_gpu, exact = device.type == "cuda", args.mode == "exact"
    name = args.model or ("smollm2-135m" if on_gpu else "tiny")
    wanted = args.tokens or (1_000_000 if on_gpu else 20_000)
    batch = args.batch or (256 if on_gpu else 16)
    new_tokens = args.new_tokens or (256 if on_gpu else 64)
    model, _ = make_model(name, dtype=torch.float32, device=device, attention=PACKED)
    settings = TrainSettings(compute_dtype=dtype, compile_layers=on_gpu, exact=exact)
    routing = find_routing(model) if args.routes else None
    replay = None if routing is None else RouteReplay(routing)
    policy = PolicyModel(model, settings=settings, replay=replay)
    engine = _engine(name, policy, args, batch=batch, new_tokens=new_tokens, exact=exact)
    known = min(1000, model.config.get_text_config().vocab_size)
    sizes = (16384, 4096, 30000, 7000) if on_gpu else (512, 128, 2048, 300)  # of microbatches
    tokens = differing = replayed = rows = 0
    largest = total = 0.0  # nats
    for number, size in enumerate(cycle(sizes)):
        groups = generate(
            engine, number, num_prompts=batch // 2, new_tokens=new_tokens, num_tokens=known
        )
        packed = pack(groups, microbatch_tokens=size)
        replayed, rows = np.add((replayed, rows), replayed_rows([packed])).tolist()
        for part in packed.microbatches:
            with torch.no_grad():
                ours, theirs = policy.logprobs(part).logprobs.cpu().numpy(), part.engine_logprobs
            apart = np.abs(ours.astype(np.float64) - theirs)
            tokens += len(ours)
            differing += int((ours.view(np.int32) != theirs.view(np.int32)).sum())
            largest = max(largest, float(apart.max(initial=0.0)))
            total += float(apart.sum())
        print(f"{tokens:,} logprobs compared, {differing:,} differ", file=sys.stderr)
        if tokens >= wanted:
            break
    stats = engine.stats()
    return {
        "model": name,
        "mode": args.mode,
        **described(device, dtype),
        "tokens": tokens,
        "differing": differing,
        "largest_difference": largest,
        "mean_difference": total / tokens,
        "prefill_tokens": stats.prefill_tokens,
        "reused_tokens": stats.cached_tokens,
        "preemptions": stats.preemptions,
        "replayed_share": replayed / rows,
    }


def _engine(
    name: str,
    policy: PolicyModel,
    args: argparse.Namespace,
    *,
    batch: int,
    new_tokens: int,
    exact: bool,
) -> EmbeddedEngine:
    """An engine with the policy's weights, and too few KV blocks for its sequences."""
    device, dtype = chosen_device(args)
    path = engine_path(device)
    model, tokenizer = make_model(name, dtype=dtype, device=device, attention=path)
    model.load_state_dict(policy.module.state_dict())
    context = 2 * new_tokens
    token_bytes = block_bytes(measure_cache(model).shapes, block_tokens=1, dtype=dtype)
    return engine_of(
        model,
        tokenizer,
        config=EngineConfig(max_sequences=batch, max_context=context),
        version=0,
        exact=exact,
        routing=find_routing(model) if args.routes else None,
        options=EmbeddedBackend(
            kv_bytes=batch * context // 4 * token_bytes,
            prefill_tokens=4 * new_tokens - 1,
            block_tokens=_BLOCK_TOKENS,
            decode_steps=args.decode_steps,
        ),
    )


def generate(
    engine: EmbeddedEngine, number: int, *, num_prompts: int, new_tokens: int, num_tokens: int
) -> list[Group]:
    """Groups of round `number`, of the first `num_tokens` tokens of the vocabulary. Every fourth
    prompt begins with the one before it, and every third request truncates."""
    rng = np.random.default_rng(number)
    prompts: dict[str, np.ndarray] = {}
    sampling: dict[str, Sampling] = {}
    for index in range(num_prompts):
        prompt = rng.integers(3, num_tokens, rng.integers(2, new_tokens)).astype(np.int32)
        if index % 4 == 3:
            prompt = np.concatenate([prompts[str(index - 1)], prompt])[: new_tokens - 1]
        length = int(rng.integers(1, new_tokens + 1))
        prompts[str(index)] = prompt
        top_p, temperature = (0.9, 0.8) if index % 3 == 2 else (1.0, 1.0)
        sampling[str(index)] = Sampling(max_new_tokens=length, top_p=top_p, temperature=temperature)
    for id, prompt in prompts.items():
        seed = number * num_prompts + int(id)
        engine.add_request(
            Request(id=id, prompt=prompt, sampling=sampling[id], n=_GROUP, seed=seed, routes_from=0)
        )
    ended: dict[str, list[Completion]] = {id: [] for id in prompts}
    while engine.has_work:
        for finished in engine.step():
            ended[finished.id] += finished.completions.values()
    return [
        group_of(
            int(id),
            [rollout_of(prompts[id], one, sampling[id]) for one in completions],
            np.ones(len(completions)),
        )
        for id, completions in ended.items()
    ]
