"""Builds the trainer that a configuration describes, and its end of the weight transport."""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from millrace.config import CriticConfig, RunConfig
from millrace.models.attention.packed import EXACT_PACKED, PACKED
from millrace.models.devices import compute_dtype, frozen_dtype, resolve_device, resolve_dtype
from millrace.models.directory import max_positions, text_config
from millrace.models.exact.attention import check_trainable
from millrace.models.exact.mode import check_exact
from millrace.models.loading import load_model
from millrace.models.lora.quantized import quantize_base
from millrace.models.lora.trained import TrainedAdapter, train_in_float32
from millrace.models.routing import (
    RouteReplay,
    check_aux_loss,
    check_bias_update,
    check_replay,
    find_routing,
)
from millrace.models.sharding import shard
from millrace.training.adapters.adapted_model import AdaptedModel
from millrace.training.adapters.policy_adapter import PolicyAdapter
from millrace.training.critic import Critic, GaeEstimator
from millrace.training.losses.recipes import build_loss
from millrace.training.optimizer import Schedule, TrainSettings
from millrace.training.parallel.ranks import Ranks
from millrace.training.policy_model import PolicyModel
from millrace.training.trainer import Trainer
from millrace.weights.backends import PackingSender
from millrace.weights.gathering import GatheringSender, WeightSender
from millrace.weights.probe import ProbeReference
from millrace.weights.transport import (
    listening_address,
    make_sender,
    resolve_transport,
    staging_device,
)


def build_trainer(
    config: RunConfig,
    *,
    path: str,
    ranks: Ranks | None = None,
    on_forward: Callable[[], None] = lambda: None,
) -> Trainer:
    """The trainer with the weights at `path`; `ranks` share it (None = one rank)."""
    ranks = ranks or Ranks()
    policy = build_policy(config, path=path, ranks=ranks, on_forward=on_forward)
    return _trainer_of(config, policy, on_forward=on_forward)


def build_trainers(
    configs: Sequence[RunConfig], *, path: str, ranks: Ranks, on_forward: Callable[[], None]
) -> list[Trainer]:
    """The trainer of each policy. Several are LoRA policies, which share the model at `path`."""
    config = configs[0]
    if len(configs) == 1:
        return [build_trainer(config, path=path, ranks=ranks, on_forward=on_forward)]
    assert config.lora is not None
    dtype = frozen_dtype(config)
    model = _load(
        config,
        path=path,
        ranks=Ranks(),
        root=lambda model: model,
        compute_dtype=train_settings(config).compute_dtype,
        dtype=dtype,
        in_nf4=config.in_nf4,
    )
    adapted = AdaptedModel(model, dtype=dtype)
    train_in_float32(model)
    replay = _replay_of(model, config)
    trainers: list[Trainer] = []
    for number, own in enumerate(configs):
        adapter = PolicyAdapter(
            model, config.lora, model_path=path, adapted=adapted, seed=config.seed + number
        )
        policy = PolicyModel(
            model,
            settings=train_settings(own),
            adapter=adapter,
            replay=replay,
            on_forward=on_forward,
            is_prepared=number > 0,
        )
        trainers.append(_trainer_of(own, policy, on_forward=on_forward))
    return trainers


def _trainer_of(
    config: RunConfig, policy: PolicyModel, *, on_forward: Callable[[], None]
) -> Trainer:
    optimizer, critic, ranks = config.optimizer, config.critic, policy.ranks
    return Trainer(
        policy,
        critic=critic and build_critic(config, critic, ranks=ranks, on_forward=on_forward),
        loss=build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens),
        schedule=Schedule(
            learning_rate=config.learning_rate,
            kind=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.trainer.steps,
            min_share=optimizer.min_lr_ratio,
        ),
        epochs=config.trainer.epochs,
        router_aux_loss=config.trainer.router_aux_loss,
        router_bias_rate=config.trainer.router_bias_rate,
        exact_kv=config.engine.kv if config.is_exact else None,
    )


def load_base(config: RunConfig) -> PreTrainedModel:
    """The weights beneath an adapter, whole and in memory of the host."""
    return load_model(
        config.model.path,
        dtype=frozen_dtype(config),
        device=torch.device("cpu"),
        attention=PACKED,
        trust_remote_code=config.model.trust_remote_code,
    )


def build_policy(
    config: RunConfig, *, path: str, ranks: Ranks, on_forward: Callable[[], None]
) -> PolicyModel:
    settings = train_settings(config)
    if settings.exact:
        check_exact(resolve_device(config.placement.trainer[0]), settings.compute_dtype)
    is_dora = config.lora is not None and config.lora.dora  # needs the norms of float32 weights
    model = _load(
        config,
        path=path,
        ranks=ranks,
        root=lambda model: model,
        compute_dtype=torch.float32 if is_dora else settings.compute_dtype,
        dtype=frozen_dtype(config),
        in_nf4=config.in_nf4,
    )
    # Loading draws random numbers for some models, such as Qwen3.5, and others for several ranks,
    # which begin with the adapter of a single rank.
    seed_everything(config.seed)
    # Before the first pass, in which FSDP collects the units of the model.
    adapter = config.lora and TrainedAdapter(model, config.lora, model_path=path)
    replay = _replay_of(model, config)
    if config.trainer.router_aux_loss:
        check_aux_loss(replay)
    if config.trainer.router_bias_rate:
        check_bias_update(model, replay)
    return PolicyModel(
        model,
        settings=settings,
        adapter=adapter,
        replay=replay,
        ranks=ranks,
        on_forward=on_forward,
    )


def _replay_of(model: PreTrainedModel, config: RunConfig) -> RouteReplay | None:
    # A dense model has no routing.
    if not config.trainer.replay_routes or (routing := find_routing(model)) is None:
        return None
    check_replay(model, routing)
    return RouteReplay(routing)


def build_critic(
    config: RunConfig, settings: CriticConfig, *, ranks: Ranks, on_forward: Callable[[], None]
) -> Critic:
    """The critic as it is before its first update."""
    train = train_settings(config)
    options = {key: value for key, value in config.scoring.advantages.items() if key != "type"}
    return Critic(
        _load(
            config,
            path=settings.path or config.model.path,
            ranks=ranks,
            root=lambda model: model.base_model,  # its head is not used
            compute_dtype=train.compute_dtype,
        ),
        estimator=GaeEstimator(**options),
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        value_clip=settings.value_clip,
        settings=train,
        ranks=ranks,
        on_forward=on_forward,
    )


def train_settings(config: RunConfig) -> TrainSettings:
    settings, optimizer = config.trainer, config.optimizer
    return TrainSettings(
        optimizer=optimizer.type,
        optimizer_options=optimizer.type_arguments,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        offload_optimizer=optimizer.offload,
        compute_dtype=compute_dtype(config),
        gradient_checkpointing=settings.gradient_checkpointing,
        compile_layers=settings.compile,
        exact=config.is_exact,
    )


def build_sender(
    config: RunConfig,
    *,
    ranks: Ranks | None = None,
    reference: ProbeReference | None = None,
    own_address: str = "",
    folder: str = "",
) -> WeightSender:
    """The sender of one rank; several ranks gather weights to rank 0, which has the transport.
    `reference`: of the probes of versions. `own_address`: this host's, if not the controller's.
    `folder`: in weights.directory, of a sender that is not the only one with these settings."""
    weights, engine, cluster = config.weights, config.engine, config.cluster

    def build() -> PackingSender:
        device = resolve_device(config.placement.trainer[0])
        name = config.placement.engine(0)
        # A named GPU need not exist here: engines may run on other hosts.
        engine_device = resolve_device(name) if name == "auto" else torch.device(name)
        staged_on, is_one_host = staging_device(config, engine_device), not config.spans_hosts
        transport = resolve_transport(
            weights.transport, device=device, engine_device=staged_on, is_one_host=is_one_host
        )
        own = cluster.advertise or cluster.address
        return make_sender(
            transport,
            dtype=resolve_dtype(config.transfer_dtype, engine_device),
            payload=weights.payload,
            directory=Path(weights.directory or Path(config.run_dir) / "weights") / folder,
            address=own_address or listening_address(own, is_one_host=is_one_host),
            num_engines=engine.num_local + engine.remote,
            num_evaluators=config.evaluate.engines,
            timeout_s=config.supervision.transfer_timeout_s,
            device=device if staged_on.type == "cuda" else None,
            reference=reference,
        )

    if ranks is None or ranks.is_alone:
        return build()
    return GatheringSender(build, timeout_s=config.supervision.transfer_timeout_s)


def seed_everything(seed: int) -> None:
    """Seed the generators that a user's loss may draw from; the built-in losses draw nothing."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _load(
    config: RunConfig,
    *,
    path: str,
    ranks: Ranks,
    root: Callable[[PreTrainedModel], Any],
    compute_dtype: torch.dtype,
    dtype: torch.dtype = torch.float32,
    in_nf4: bool = False,
) -> PreTrainedModel:
    def shard_over_ranks(model: PreTrainedModel) -> None:
        shard(model, root=root(model), meshes=ranks.sharding_meshes, dtype=compute_dtype)

    device, trust = resolve_device(config.placement.trainer[0]), config.model.trust_remote_code
    if config.is_exact:
        text = text_config(path, trust_remote_code=trust)
        limit = config.engine.max_context or max_positions(text)
        check_trainable(text, device, max_context=limit or sys.maxsize)
    model = load_model(
        path,
        dtype=dtype,
        device=torch.device("cpu") if in_nf4 else device,
        attention=EXACT_PACKED if config.is_exact else PACKED,
        trust_remote_code=trust,
        shard=None if ranks.is_alone else shard_over_ranks,
    )
    if in_nf4:
        quantize_base(model, device=device)
    return model
