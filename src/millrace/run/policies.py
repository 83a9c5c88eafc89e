"""Several policies in one run: what [policies] means for the other settings.

The first policy is that of every other section: engines, the trainer and checkpoints/ are its own.
Each further one has engines like a model of environment.models, a trainer process, and a folder
policies/NAME with its checkpoints. With [lora], all are adapters of one model, in one trainer and
one set of engines. Promise: what a run with several policies cannot do yet is refused in one
sentence before any worker starts.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import PolicyConfig, RoleModelConfig, RunConfig
from millrace.config.episodes import OF_POLICY
from millrace.config.training import MUON, OptimizerConfig
from millrace.core.errors import CheckpointError, ConfigError
from millrace.core.files import check_file_name
from millrace.monitoring.run_dir import RunDir
from millrace.run import checks
from millrace.run.mesh_checks import check_baseline
from millrace.run.resume import check_same_model, check_same_policies
from millrace.scoring.pool import ScorerSpec
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.training.checkpoints.directory import (
    damage_to,
    keep_steps,
    past_folders,
    read_run_state,
)
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.recipes import build_loss

FOLDER = "policies"


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherPolicy:
    """A policy besides the first, as its trainer and engines see it."""

    config: RunConfig
    checkpoint: Path | None  # to resume from


def expand_policies(config: RunConfig) -> RunConfig:
    """The settings with complete tables of policies: the sections of the run are those of the
    first, and environment.models has the others."""
    if not config.policies:
        return config
    full = {
        name: PolicyConfig(
            model=own.model or config.model.path,
            optimizer={**config.optimizer.model_dump(), **own.optimizer},
            loss=own.loss or config.loss,
            lags=own.lags,
        )
        for name, own in config.policies.items()
    }
    engine = config.engine.model_dump(exclude={*OF_POLICY, "count"})
    models = {
        name: RoleModelConfig.model_validate(
            {
                **config.model.model_dump(),
                "path": own.model,
                **engine,
                "template": config.environment.template,
                "count": config.engine.num_local,
            }
        )
        for name, own in list(full.items())[1:]
        if name not in config.adapter_policies
    }
    for name in config.lagged:
        if name in (*config.policies, *config.engine.adapters):
            raise ConfigError(f"{name!r} is the name of an earlier version; rename that adapter.")
    for name, own in config.policies.items():
        check_file_name(name, of="One of policies")
        if own.lags and config.lora is None:
            raise ConfigError(
                f"policies.{name}.lags = {list(own.lags)}, but only adapters have earlier versions"
                " in the engines; add [lora], or remove it."
            )
        for setting in ("environment.models", "engine.adapters"):
            section, _, key = setting.partition(".")
            if name in getattr(getattr(config, section), key):
                raise ConfigError(
                    f"policies.{name} and {setting}.{name} have one name; rename one of them."
                )
        if config.lora is not None and own.model and own.model != config.model.path:
            raise ConfigError(
                f"policies.{name}.model = {own.model!r}, but with [lora] all policies are adapters"
                f" of model = {config.model.path!r}; remove it, or remove [lora]."
            )
    ranks = 1 if config.trainer.ranks == "auto" else config.trainer.ranks
    return config.updated(
        policies=full,
        **_sections(next(iter(full.values()))),
        trainer={"ranks": ranks},
        environment={"models": {**config.environment.models, **models}},
    )


def _sections(policy: PolicyConfig) -> dict[str, Any]:
    """The sections of a run with this policy alone; its table is complete."""
    return {
        "model": {"path": policy.model},
        "optimizer": OptimizerConfig.model_validate(policy.optimizer),
        "loss": policy.loss,
    }


def check_policies(
    config: RunConfig, specs: Sequence[ScorerSpec], *, has_roles: bool, trains: bool
) -> None:
    """Refuse what several policies cannot do. `has_roles`: there is an environment function."""
    if not config.policies:
        return
    if not trains:
        raise ConfigError(
            f"Only a run that trains has several policies ({', '.join(config.policies)}); remove"
            " [policies] to evaluate one model in all roles."
        )
    if not has_roles or config.environment.command:
        raise ConfigError(
            f"policies ({', '.join(config.policies)}) are roles of an environment.function, and"
            " there is none; write one, or remove them."
        )
    engine, trainer = config.engine, config.trainer
    obstacles = {
        **_obstacles_of_adapters(config),
        "[critic]": config.critic is not None,
        f"engine.type = {engine.type!r}": engine.type != "embedded",
        f"trainer.ranks = {trainer.ranks}": trainer.ranks != 1,
        f"trainer.mesh.dp_shard = {trainer.mesh.dp_shard}": trainer.is_sharded,
        f"trainer.remote = {trainer.remote}": trainer.remote > 0,
        f"engine.remote = {engine.remote}": engine.remote > 0,
        f"engine.max_count = {engine.max_count}": engine.max_count is not None,
        f"evaluate.engines = {config.evaluate.engines}": config.evaluate.engines > 0,
        f"checkpoint.path = {config.checkpoint.path!r}": config.checkpoint.path is not None,
        "weights.notify": bool(config.weights.notify),
        "weights.interrupt = 'barrier'": config.weights.interrupt == "barrier",
        "environment.recipe": config.environment.recipe is not None,
        f"cluster.launcher of type {config.cluster.launcher.get('type')!r}": (
            not config.cluster.is_local
        ),
    }
    obstacles |= {
        f"the scorer {spec.name!r}, which gives logprobs of one model": True
        for spec in specs
        if isinstance(spec.type, LogprobModelSettings)
    }
    if obstacle := next((name for name, is_set in obstacles.items() if is_set), None):
        raise ConfigError(
            f"A run with several policies does not support {obstacle}; remove it, or keep one"
            " policy."
        )
    for name in config.policies:
        own = policy_config(config, name)
        loss = build_loss(own.loss, max_new_tokens=own.sampling.max_new_tokens)
        checks.check_loss(own, loss)
        check_baseline(own, loss)
        if isinstance(loss, PolicyLoss) and loss.distil.is_on:  # teachers are refused above
            raise ConfigError(
                f"policies.{name}.loss.distil = {loss.distil.distil!r} learns from a teacher, which"
                " a run with several policies does not support; choose another loss."
            )


def _obstacles_of_adapters(config: RunConfig) -> dict[str, bool]:
    """What adapters of one model cannot do, if the policies are adapters."""
    if (lora := config.lora) is None or not config.further_adapters:
        return {}
    optimizers = [policy.optimizer["type"] for policy in config.policies.values()]
    return {
        "lora.dora = true": lora.dora,
        "lora.apply = 'merged'": lora.apply == "merged",
        f"optimizer.type = {MUON!r} with [lora]": MUON in optimizers,
        "fidelity.mode = 'exact' with [lora]": config.is_exact,
        "trainer.compile = true with [lora]": config.trainer.compile,
        "trainer.router_aux_loss with [lora]": config.trainer.router_aux_loss > 0,
        "weights.probe = true with [lora]": config.probes_weights,
    }


def policy_config(config: RunConfig, name: str) -> RunConfig:
    folder, placement = Path(config.run_dir) / FOLDER / name, config.placement
    changed = config.updated(
        run_dir=str(folder),
        **_sections(config.policies[name]),
        # The controller removes its checkpoints, after those of the first policy.
        checkpoint={"keep": sys.maxsize},
        engine={"adapters": {}},  # are of the first model
        weights={"directory": None},
        placement={"engines": placement.models.get(name, placement.engines)},
    )
    return changed.updated(optimizer={"learning_rate": changed.learning_rate})


def further_policies(config: RunConfig, *, checkpoint: Path | None) -> dict[str, FurtherPolicy]:
    """The policies besides the first, each at the step of the first policy's `checkpoint`."""
    if checkpoint is not None:
        saved = read_run_state(checkpoint).get("policies", [])
        check_same_policies(config, saved, source=checkpoint)
    found: dict[str, FurtherPolicy] = {}
    for name in [*config.policies][1:]:
        own = policy_config(config, name)
        path = None if checkpoint is None else RunDir(own.run_dir).checkpoints / checkpoint.name
        if path is not None and (damage := damage_to(path)) is not None:
            raise CheckpointError(
                f"The checkpoint {str(path)!r} of policy {name!r} cannot be used: it {damage};"
                f" remove {str(checkpoint)!r} to resume from the one before it."
            )
        if path is not None:
            check_same_model(path, own.model)
        found[name] = FurtherPolicy(config=own, checkpoint=path)
    return found


def saved_versions(
    config: RunConfig, further: Mapping[str, FurtherPolicy], *, checkpoint: Path | None
) -> dict[str, int]:
    """The version of each policy where the run begins; `checkpoint` is that of the first."""
    folders = [checkpoint, *(own.checkpoint for own in further.values())]
    return {name: _behind(at, 0)[1] for name, at in zip(config.policies, folders, strict=False)}


def first_adapters(
    config: RunConfig, further: Mapping[str, FurtherPolicy], *, checkpoint: Path | None
) -> dict[str, tuple[Path | None, int]]:
    """The folder and the version of each adapter that engines begin with, besides that of the first
    policy, whose `checkpoint` this is. None = it changes nothing yet."""
    folders = {name: own.checkpoint for name, own in further.items()}
    return {
        name: _behind(folders.get(policy, checkpoint), lag)
        for name, (policy, lag) in {
            **{name: (name, 0) for name in config.adapter_policies},
            **config.lagged,
        }.items()
    }


def _behind(checkpoint: Path | None, lag: int) -> tuple[Path | None, int]:
    """The version `lag` versions before a checkpoint, or the oldest that it holds."""
    if checkpoint is None:
        return None, 0
    version = int(read_run_state(checkpoint)["version"])
    saved = past_folders(checkpoint) if lag else {}
    wanted = max(version - lag, min(saved, default=version))
    return saved.get(wanted, checkpoint), wanted


def remove_later_checkpoints(config: RunConfig, *, version: int) -> None:
    """Remove checkpoints of further policies that the first has none of, as after a crash between
    the two, and those after `version`, at which the run begins."""
    for name in list(config.policies)[1:]:
        own = RunDir(policy_config(config, name).run_dir)
        keep_steps(own.checkpoints, like=RunDir(config.run_dir).checkpoints, through=version)
