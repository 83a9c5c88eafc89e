"""Builds the trainer that a configuration describes, and its end of the weight transport."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.config import CriticConfig, RunConfig, TrainerConfig
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.loading import load_model, resolve_device
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.moe.router_search import check_replay, find_routing
from millrace.models.moe.routing import RouteReplay
from millrace.training.critic import Critic, GaeEstimator
from millrace.training.losses.recipes import build_loss
from millrace.training.optimizer import Schedule
from millrace.training.policy_model import PolicyModel
from millrace.training.settings import TrainSettings
from millrace.training.trainer import Trainer
from millrace.weights.publisher import Sender
from millrace.weights.sender import make_sender, resolve_address, resolve_transport


def build_trainer(
    config: RunConfig, *, path: str, on_forward: Callable[[], None] = lambda: None
) -> Trainer:
    """The trainer with the weights at `path`."""
    settings = config.trainer
    critic = None
    if config.critic is not None:
        critic = build_critic(config, config.critic, on_forward=on_forward)
    return Trainer(
        build_policy(config, path=path, on_forward=on_forward),
        critic=critic,
        loss=build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens),
        schedule=Schedule(
            learning_rate=settings.learning_rate,
            kind=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
            min_share=settings.min_learning_rate_share,
        ),
        epochs=settings.epochs,
    )


def build_policy(config: RunConfig, *, path: str, on_forward: Callable[[], None]) -> PolicyModel:
    model = _load(config, path=path)
    adapter = None
    if config.lora is not None:
        adapter = TrainedAdapter(model, config.lora, model_path=path)
    return PolicyModel(
        model,
        settings=train_settings(config.trainer),
        adapter=adapter,
        replay=build_replay(model) if config.trainer.replay_routes else None,
        logprob_chunk=config.trainer.logprob_chunk,
        on_forward=on_forward,
    )


def build_replay(model: PreTrainedModel) -> RouteReplay | None:
    """None for a dense model; raises ConfigError if the model's routes cannot be replayed."""
    routing = find_routing(model)
    if routing is None:
        return None
    check_replay(model, routing)
    return RouteReplay(routing)


def build_critic(
    config: RunConfig, settings: CriticConfig, *, on_forward: Callable[[], None]
) -> Critic:
    """The critic as it is before its first update."""
    return Critic(
        _load(config, path=settings.path or config.model.path),
        estimator=GaeEstimator(
            discount=settings.discount, decay=settings.decay, normalize=settings.normalize
        ),
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        value_clip=settings.value_clip,
        loss_weight=settings.loss_weight,
        settings=train_settings(config.trainer),
        on_forward=on_forward,
    )


def train_settings(settings: TrainerConfig) -> TrainSettings:
    return TrainSettings(
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        compute_dtype=getattr(torch, settings.dtype),
        gradient_checkpointing=settings.gradient_checkpointing,
        compile_layers=settings.compile,
    )


def build_sender(config: RunConfig) -> Sender:
    """The trainer's end of the weight transport."""
    weights, engine = config.weights, config.engine
    device = resolve_device(config.trainer.device)
    is_one_host = engine.remote == 0
    transport = resolve_transport(
        weights.transport, device=device, engine_device=engine.device, is_one_host=is_one_host
    )
    return make_sender(
        transport,
        dtype=getattr(torch, config.travel_dtype),
        payload=weights.payload,
        directory=Path(weights.directory or Path(config.run_dir) / "weights"),
        address=resolve_address(
            weights.address,
            is_one_host=is_one_host,
            cluster_address=config.cluster.advertise or config.cluster.address,
        ),
        num_engines=engine.count + engine.remote,
        bucket_bytes=weights.bucket_bytes,
        timeout_s=weights.timeout_s,
        device=device if engine.device != "cpu" else None,
    )


def seed_everything(seed: int) -> None:
    """Seed the generators that a user's loss may draw from; the built-in losses draw nothing."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _load(config: RunConfig, *, path: str) -> PreTrainedModel:
    return load_model(
        path,
        dtype=torch.float32,
        device=resolve_device(config.trainer.device),
        attention=PACKED_ATTENTION,
        trust_remote_code=config.model.trust_remote_code,
    )
