"""A tiny model that talks ChatML, in an engine of this process and in a trainer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from chat_engine import TOKENIZERS
from in_process_engine import InProcessEngine
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from millrace.core.microbatch import Batch
from millrace.core.records import Sampling
from millrace.environments.agent import Agent
from millrace.environments.episode_state import EpisodeState
from millrace.environments.replay.schema import EpisodeLimits, EpisodeSettings
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.rollouts.player import GroupPolicy
from millrace.environments.rollouts.renderer import Renderer, role_model
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION
from millrace.inference.embedded.parts import EngineSizes
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.routing import RouteReplay, find_routing
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer

torch.set_num_threads(1)

TOKENIZER = TOKENIZERS["chatml"]
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
BLOCK = 4


def make_model(seed: int = 0, *, num_experts: int = 0) -> PreTrainedModel:
    """With `num_experts` a mixture, two of which see each token."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(TOKENIZER),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    if not num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).eval()


def make_engine(
    *, seed: int = 0, device: str = "cpu", num_experts: int = 0, **settings: Any
) -> EmbeddedEngine:
    model = make_model(seed, num_experts=num_experts).to(device)
    model.set_attn_implementation(PAGED_ATTENTION)
    routing = settings.pop("routing", find_routing(model))
    sizes = {"max_context": 2048, "max_sequences": 8, "num_blocks": 2048, "prefill_tokens": 512}
    return EmbeddedEngine(
        model,
        TOKENIZER,
        sizes=EngineSizes(**{**sizes, "block_tokens": BLOCK, **settings}),
        version=0,
        eos_ids=[END],
        routing=routing,
    )


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in make_model(seed).named_parameters()}


@asynccontextmanager
async def agent_on(
    engine: EmbeddedEngine, *, seed: int = 0, **sampling: Any
) -> AsyncIterator[tuple[Agent, EpisodeState]]:
    """An agent of one episode, whose engine runs on this loop."""
    remote = InProcessEngine(engine, receiver=None)  # type: ignore[arg-type]
    running = asyncio.create_task(remote.run())
    renderer = Renderer(TOKENIZER)
    policy = GroupPolicy(
        engine=remote,
        renderer=renderer,
        sampling=Sampling(**{"max_new_tokens": 12, **sampling}),
        max_context=2048,
        name="group 0",
        seed=seed,
        attempt=Attempt(0),
        wants_routes=True,
    )
    model = role_model(renderer, max_context=policy.max_context, tool_format="hermes")
    settings = EpisodeSettings(
        name=policy.name,
        index=0,
        random_index=0,
        limits=EpisodeLimits(max_turns=10_000),
        policy=model.row,
        sampling=policy.sampling,
    )
    state = EpisodeState(settings, models={None: model}, sample=policy.sample, root=0)
    try:
        yield state.agent(), state
    finally:
        running.cancel()


def make_trainer(seed: int = 0, *, num_experts: int = 0) -> Trainer:
    model = make_model(seed, num_experts=num_experts)
    model.set_attn_implementation(PACKED_ATTENTION)
    routing = find_routing(model)
    replay = None if routing is None else RouteReplay(routing)
    return Trainer(
        PolicyModel(model, settings=TrainSettings(), replay=replay),
        loss=PolicyLoss(),
        schedule=Schedule(learning_rate=1e-3, total_steps=1),
    )


def assert_says_the_same(trainer: Trainer, batch: Batch) -> None:
    """What the engine said about every token that is trained."""
    for micro in batch.microbatches:
        logprobs = trainer.policy.logprobs(micro).logprobs
        np.testing.assert_allclose(
            logprobs.detach().numpy(), micro.engine_logprobs, rtol=0, atol=1e-5
        )
