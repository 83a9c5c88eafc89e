"""Logprob mismatch of engine and trainer with and without replayed expert routes.

    python benchmarks/routing_replay.py [--device cuda] [--trainer-dtype bfloat16]

A small mixture of experts with random weights (8 layers, 32 experts, 4 of them per token) samples
answers in bfloat16, as engines do on a GPU. The trainer computes the logprobs of the same tokens,
once with the experts that the engine recorded and once with those that its own routers choose. The
script prints one JSON object: mean and 99th percentile of |engine - trainer| over the sampled
tokens, and the share of the engine's choices that the trainer's routers would not have made.
"""

import argparse
import json
import tempfile
from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from millrace.config import EngineConfig
from millrace.core.microbatch import Microbatch
from millrace.core.records import Completion, Episode, Group, Request, Sampling, Task
from millrace.demo.model import EOS_ID, PAD_ID, build_tokenizer
from millrace.environments.token_record import rollout_of
from millrace.inference.backend import EmbeddedBackend, EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.models.attention.packed import PACKED
from millrace.models.devices import resolve_device
from millrace.models.loading import load_model, without_progress_bars
from millrace.models.routing import RouteReplay, Routing, find_routing
from millrace.training.optimizer import TrainSettings
from millrace.training.packing.packer import pack
from millrace.training.policy_model import PolicyModel

VOCAB = 512
PROMPT_TOKENS = 32
SAMPLING = Sampling(max_new_tokens=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trainer-dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_mixture(folder)
        part = sample(folder, num_prompts=args.prompts, device=args.device)
        result = measure(folder, part, device=args.device, dtype=args.trainer_dtype)
    print(json.dumps(result, indent=2))


def make_mixture(folder: str, *, num_layers: int = 8, num_experts: int = 32) -> None:
    """Write a model directory. Like trained routers, its routers mostly have a clear choice and
    sometimes almost a tie."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=num_experts,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        max_position_embeddings=512,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    with without_progress_bars():
        model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def sample(folder: str, *, num_prompts: int, device: str) -> Microbatch:
    """Four answers to each prompt, packed for the trainer, with their expert routes."""
    # With the decode loop, because it keeps the residual stream in float32, as on a GPU.
    spec = EngineSpec(
        config=EngineConfig(dtype="bfloat16", max_context=256),
        device=device,
        model_path=folder,
        version=0,
        records_routes=True,
    )
    engine = build_engine(spec, options=EmbeddedBackend(decode_steps=8))
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB, (num_prompts, PROMPT_TOKENS)).astype(np.int32)
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(id=str(index), prompt=prompt, sampling=SAMPLING, n=4, seed=index, routes_from=0)
        )
    ended: dict[str, dict[int, Completion]] = {}
    while engine.has_work:
        for one in engine.step():
            ended.setdefault(one.id, {}).update(one.completions)
    answers = {id: [own[i] for i in sorted(own)] for id, own in ended.items()}
    (part,) = pack(
        [_group(index, prompt, answers[str(index)]) for index, prompt in enumerate(prompts)],
        microbatch_tokens=10**6,
    ).microbatches
    return part


def _group(number: int, prompt: np.ndarray, answers: list[Completion]) -> Group:
    rollouts = [rollout_of(prompt, answer, SAMPLING) for answer in answers]
    return Group(
        number=number,
        task=Task(prompt=""),
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        advantages=np.ones(len(rollouts), dtype=np.float32),
    )


def measure(folder: str, part: Microbatch, *, device: str, dtype: str) -> dict[str, float]:
    model = load_model(folder, dtype=torch.float32, device=resolve_device(device), attention=PACKED)
    routing = find_routing(model)
    assert routing is not None
    assert part.routes is not None
    settings = TrainSettings(compute_dtype=getattr(torch, dtype))
    policy = PolicyModel(model, settings=settings, replay=RouteReplay(routing))
    result: dict[str, float] = {"tokens": len(part.targets)}
    for name, batch in (("replayed", part), ("own", replace(part, routes=None))):
        with torch.no_grad():
            logprobs = policy.logprobs(batch).logprobs.cpu().numpy()
        difference = np.abs(logprobs - part.engine_logprobs)
        result |= {f"{name}_mean": float(difference.mean())}
        result |= {f"{name}_p99": float(np.quantile(difference, 0.99))}
    own = _own_routes(policy, routing, replace(part, routes=None))
    is_other = ~(part.routes[..., None] == own[:, :, None]).any(-1)  # [T, layers, top_k]
    result |= {"other_experts": float(is_other.mean())}
    result |= {"other_tokens": float(is_other.any((1, 2)).mean())}
    return {name: round(value, 6) for name, value in result.items()}


def _own_routes(policy: PolicyModel, routing: Routing, part: Microbatch) -> np.ndarray:
    """[T, layers, top_k]; the experts that the trainer's routers choose."""
    chosen: list[torch.Tensor] = []

    class RouteRecorder:
        def choose(self, own: torch.Tensor, *, scores: torch.Tensor) -> torch.Tensor:
            chosen.append(own)
            return own

    routing.install([RouteRecorder() for _ in routing.routers])
    with torch.no_grad():
        policy.logprobs(part)
    return torch.stack(chosen, 1).cpu().numpy()


if __name__ == "__main__":
    main()
