"""Checks and resolves everything of a run that needs no worker.

Promise: what prepare() returns is enough to run, and every error it raises is one sentence about
the user's own input. Settings, names of built-ins and paths are checked before torch is imported.
It reads the model's tokenizer and configuration, never its weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.cluster.launchers.launcher import HostDevice
from millrace.cluster.process import available_cores
from millrace.config import ModelConfig, RunConfig
from millrace.config.training import ADAMW_8BIT
from millrace.controller.orders import check_room
from millrace.core.errors import ConfigError
from millrace.core.protocols import Advantages
from millrace.core.records import Task
from millrace.environments.adapters import EnvironmentFactory, split_rewards
from millrace.environments.branching import Recipe
from millrace.environments.function_environment import EnvironmentFunction
from millrace.environments.rollouts.renderer import Renderer, RoleModel
from millrace.inference import backend
from millrace.inference.capabilities import check_capabilities, seed_warnings
from millrace.journal import JournalHistory
from millrace.models import directory
from millrace.run import checks, placement
from millrace.run.environment import (
    build_environment,
    check_prompts,
    load_models,
    resolve_recipe,
    with_servers,
)
from millrace.run.mesh_checks import check_baseline, check_mesh, check_model_mesh, rank_warnings
from millrace.run.policies import (
    FurtherPolicy,
    check_policies,
    expand_policies,
    first_adapters,
    further_policies,
    saved_versions,
)
from millrace.run.resume import Cursor, find_resume_point
from millrace.scoring.advantages import CRITIC, TREE, build_advantages
from millrace.scoring.pool import ScorerSpec, check_scorers, function_scorer, resolve_scorers
from millrace.scoring.scorer_type import RunInfo
from millrace.scoring.shaping import ROC, Shaping, build_shaping
from millrace.scoring.teachers.teacher import Reference, SelfTeacher, Teacher
from millrace.tasks.loading import load_section, load_sources, make_stream
from millrace.tasks.streams import TaskStream
from millrace.training.losses.recipes import ADVANTAGES, DEFAULT, RECIPES, build_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    config: RunConfig  # with every "auto" resolved that the controller decides
    given: RunConfig  # before its processes were placed
    processes: Sequence[placement.PlacedProcess]
    devices: tuple[HostDevice, ...]  # of this host
    tasks: TaskStream
    held_out: tuple[Task, ...]
    tokenizer: Any
    renderer: Renderer
    max_context: int
    checkpoint: Path | None  # to resume from
    cursor: Cursor
    history: JournalHistory | None  # what the journal holds; None = the run keeps no journal
    notes: tuple[str, ...] = ()  # sentences for the user
    warnings: tuple[str, ...] = ()
    advantages: Advantages = field(default_factory=lambda: build_advantages({}))
    shaping: Shaping = field(default_factory=Shaping)
    scorers: tuple[ScorerSpec, ...] = ()
    environment: EnvironmentFunction | None = None  # None = one prompt, one completion
    given_environment: EnvironmentFunction | None = None  # what of it is no setting, but an object
    recipe: Recipe | None = None
    models: Mapping[str, RoleModel] = field(default_factory=dict[str, RoleModel])  # by name
    policies: Mapping[str, FurtherPolicy] = field(default_factory=dict[str, FurtherPolicy])

    @property
    def portable_config(self) -> RunConfig:
        """The settings without what holds on this host only: it may be resumed on another one."""
        given, models = self.given, self.config.environment.models
        return self.config.updated(
            placement=given.placement,
            engine={"count": given.engine.count},
            trainer={"ranks": given.trainer.ranks},
            # Those of policies are made from their tables.
            environment={"models": {k: v for k, v in models.items() if k not in self.policies}},
        )

    @property
    def model_path(self) -> str:
        """What engines load: the model of the settings, or the checkpoint that replaces it."""
        is_whole = self.checkpoint is not None and self.config.lora is None
        return str(self.checkpoint) if is_whole else self.config.model.path

    @property
    def adapter_path(self) -> str | None:
        """The LoRA adapter that engines load on top of it: the checkpoint of a LoRA run."""
        is_adapter = self.checkpoint is not None and self.config.lora is not None
        return str(self.checkpoint) if is_adapter else None

    @property
    def version(self) -> int:
        """The version of the only or first policy."""
        return next(iter(self.versions.values()), self.cursor.version)

    @property
    def versions(self) -> dict[str, int]:
        """The versions of several policies, by name."""
        return saved_versions(self.config, self.policies, checkpoint=self.checkpoint)

    @property
    def sent_versions(self) -> dict[str, int]:
        """The versions of all that engines receive besides the first policy."""
        versions = self.versions
        lagged = {name: version for name, (_, version) in self.adapters.items()}
        return {**{name: versions[name] for name in self.policies}, **lagged}

    @property
    def adapters(self) -> dict[str, tuple[Path | None, int]]:
        """The folders and versions of config.further_adapters."""
        return first_adapters(self.config, self.policies, checkpoint=self.checkpoint)

    @property
    def run_info(self) -> RunInfo:
        model = self.config.model
        found = directory.text_config(model.path, trust_remote_code=model.trust_remote_code)
        return RunInfo(
            config=self.config,
            tokenizer=self.tokenizer,
            vocab_size=found.vocab_size,
            max_context=self.max_context,
            render=self.renderer.render,
            model_path=self.model_path,
            adapter_path=self.adapter_path,
            version=self.cursor.version,
        )


def prepare(
    config: RunConfig,
    *,
    tasks: Sequence[Any] | None = None,
    eval_tasks: Sequence[Any] | None = None,
    scorers: Sequence[Callable[..., Any]] = (),
    environment: Callable[..., Any] | None = None,
    resume: bool = False,
    trains: bool = True,  # False: there is no trainer, which would need memory
) -> PreparedRun:
    checks.check_settings(config := expand_policies(config), trains=trains)
    sources = load_sources(config.tasks, tasks)
    train_tasks = [task for source in sources for task in source.tasks]
    held_out = load_section(config.evaluate, eval_tasks, section="evaluate")
    all_tasks = [*train_tasks, *held_out]
    specs = [*resolve_scorers(config.scorers), *map(function_scorer, scorers)]
    specs, function = split_rewards(specs, build_environment(config, environment), tasks=all_tasks)
    may_be_empty = environment is not None or config.environment.may_reward
    check_scorers(specs, all_tasks, may_be_empty=may_be_empty)
    checks.check_roles(config, specs, num_held_out=len(held_out))
    config = _resolve_objective(config, specs)
    check_policies(config, specs, has_roles=function is not None, trains=trains)
    advantages = build_advantages(config.scoring.advantages)
    shaping = _shaping(config, scorers=[spec.name for spec in specs])
    checks.check_plugins(config)
    recipe = resolve_recipe(config, specs)
    backend.load_backends(config)  # raises ConfigError for one that does not exist
    # Files of the model are read from here on, which imports torch.
    tokenizer, max_context = read_model(config.model, wanted=config.engine.max_context)
    given, (config, processes, devices) = config, place(config, specs, trains=trains)
    idle = placement.idle_gpus(config, processes, devices) if trains else ()
    _check_critic(config, num_tokens=len(tokenizer), max_context=max_context)
    renderer = Renderer(tokenizer, template_settings=config.environment.template)
    renderer.check(all_tasks)
    check_prompts(renderer, train_tasks, max_context=max_context, is_played=function is not None)
    stream = make_stream(sources, config.tasks, seed=config.seed)
    point = find_resume_point(config, stream, resume=resume)
    prepared = PreparedRun(
        config=config,
        given=given,
        processes=processes,
        devices=devices,
        tasks=stream,
        held_out=tuple(held_out[: config.evaluate.max_tasks]),
        scorers=specs,
        advantages=advantages,
        shaping=shaping,
        tokenizer=tokenizer,
        renderer=renderer,
        environment=function and with_servers(config, function),
        given_environment=function if isinstance(function, EnvironmentFactory) else environment,
        recipe=recipe,
        models=load_models(config, has_roles=function is not None),
        policies=further_policies(config, checkpoint=point.checkpoint),
        max_context=max_context,
        notes=check_model(config) + idle,
        **point._replace(warnings=(*point.warnings, *check_files(config)))._asdict(),
    )
    _check_teachers(prepared)
    return prepared


def _check_teachers(prepared: PreparedRun) -> None:
    for spec in prepared.scorers:
        if isinstance(spec.type, Teacher | SelfTeacher | Reference):
            spec.type.check_model(prepared.run_info, name=spec.name)


def _resolve_objective(config: RunConfig, specs: Sequence[ScorerSpec]) -> RunConfig:
    """Resolve what the loss implies and what teachers imply for it, and check the result."""
    config = config.updated(
        scoring={"advantages": _estimator(config)},
        loss={**_distillation(config, specs), **config.loss},
    )
    check_room(
        config.buffer.order,
        groups_per_step=config.trainer.groups_per_step,
        capacity=config.buffer_capacity,
        limit=config.buffer.limit,
    )
    loss = build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens)
    checks.check_loss(config, loss)
    check_baseline(config, loss)
    checks.check_teaching(config, specs, loss=loss)
    checks.check_filters(config)
    return config


def read_model(model: ModelConfig, *, wanted: int | None) -> tuple[Any, int]:
    """The tokenizer, and the length of the longest sequence in tokens; `wanted` is that setting."""
    trust = {"trust_remote_code": model.trust_remote_code}
    tokenizer = directory.load_tokenizer(model.path, **trust)
    setting = "engine.max_context"
    return tokenizer, directory.context_length(model.path, wanted=wanted, setting=setting, **trust)


def place(
    config: RunConfig, specs: Sequence[ScorerSpec], *, trains: bool = True
) -> tuple[RunConfig, list[placement.PlacedProcess], tuple[HostDevice, ...]]:
    """The settings with every "auto" resolved, and what runs where."""
    from millrace.models.devices import resolve_device

    models, devices = placement.other_models(config, specs), placement.host_devices()
    is_local = config.cluster.is_local
    # Another launcher chooses the GPUs, so the number of processes is that of the settings.
    config = placement.placed(config, devices=devices if is_local else devices[-1:], models=models)
    check_mesh(config)
    placement.check_devices(config, resolve_device)
    config = _resolve_auto(config)
    processes = placement.placed_processes(config, devices=devices, models=models, trains=trains)
    if is_local:
        placement.check_placed(config, processes, devices)
    return config, processes, devices


def check_model(config: RunConfig) -> tuple[str, ...]:
    """Check [lora] against the model; returns what the user should see of both."""
    model, wanted, setting = config.model, config.engine.max_context, "engine.max_context"
    trust = {"trust_remote_code": model.trust_remote_code}
    notes = directory.context_notes(model.path, wanted=wanted, setting=setting, **trust)
    if config.lora is None:
        return notes
    from millrace.models.loading import empty_model
    from millrace.models.lora.factors import adapted_layers, describe_layers, require_peft
    from millrace.models.lora.quantized import quantizable_layers

    require_peft()
    empty = empty_model(model.path, **trust)
    if config.in_nf4:
        quantizable_layers(empty)  # raises if it has none
    return *notes, describe_layers(adapted_layers(empty, config.lora), rank=config.lora.rank)


def check_files(config: RunConfig) -> tuple[str, ...]:
    """Check what optimizer, mesh and engine backends must offer for this model, and resident
    adapters; returns warnings about the policy's backend and the ranks."""
    model = config.model
    if config.optimizer.type == ADAMW_8BIT:
        from millrace.training.optimizer import require_torchao

        require_torchao()
    if config.engine.num_local > 0 and config.engine.adapters:  # other hosts have their own folders
        from millrace.models.lora.folders import check_resident

        for name, folder in config.engine.adapters.items():
            check_resident(name, Path(folder))
    found = directory.text_config(model.path, trust_remote_code=model.trust_remote_code)
    check_model_mesh(config.trainer.mesh_sizes, found, path=model.path)
    backend.check_servers(config)
    offered = {name: own.capabilities for name, own in backend.load_backends(config).items()}
    has_experts = directory.num_experts(found) > 0
    for section, capabilities in offered.items():
        check_capabilities(config, capabilities, section=section, has_experts=has_experts)
    return *seed_warnings(config.engine, offered["engine"]), *rank_warnings(config)


def _shaping(config: RunConfig, *, scorers: Sequence[str]) -> Shaping:
    selection = config.rollout.selection
    if selection.get("type", ROC) == ROC:  # an episode counts as solved at the same score anywhere
        selection = {"solved_at": config.evaluate.solved_at, **selection}
    return build_shaping(
        penalties=config.scoring.penalty,
        filters=config.rollout.filter,
        selection=selection,
        keep=config.rollout.group_size,
        seed=config.seed,
        scorers=scorers,
    )


def _check_critic(config: RunConfig, *, num_tokens: int, max_context: int) -> None:
    """A critic that starts from another model must know the policy's tokens and lengths."""
    if config.critic is None or (path := config.critic.path) is None:
        return
    trust = config.model.trust_remote_code
    found = directory.text_config(path, trust_remote_code=trust, setting="critic.path")
    if found.vocab_size < num_tokens:
        raise ConfigError(
            f"critic.path = {path!r} knows {found.vocab_size} tokens, but the policy has"
            f" {num_tokens}; choose a model with the tokenizer of model.path."
        )
    check_model_mesh(config.trainer.mesh_sizes, found, path=path)
    context = directory.max_positions(found)
    if context is not None and context < max_context:
        raise ConfigError(
            f"critic.path = {path!r} reads {context} tokens, but sequences may have {max_context};"
            " lower engine.max_context, or choose another model."
        )


def _estimator(config: RunConfig) -> dict[str, Any]:
    """The table of scoring.advantages; "auto" is the estimator that belongs to the loss."""
    table = {"type": "group", **config.scoring.advantages}
    if table["type"] != "auto":
        checks.check_estimator(str(table["type"]), has_critic=config.critic is not None)
        return table
    if len(table) > 1:
        raise ConfigError(
            f"Section 'scoring.advantages' leaves its type to the loss but sets"
            f" {', '.join(key for key in table if key != 'type')}; set the type, too."
        )
    if config.critic is not None:
        return {"type": CRITIC}
    if config.environment.recipe is not None:
        return {"type": TREE}
    recipe = str(config.loss.get("type", DEFAULT))
    return dict(ADVANTAGES.get(recipe, {"type": "group"}))


def _resolve_auto(config: RunConfig) -> RunConfig:
    """Replace "auto" by the learning rate, CPU threads and data types of this run. All engines use
    one data type, those of other hosts included: weights travel in it."""
    import torch

    from millrace.models.devices import resolve_device, resolve_dtype

    def dtype(wanted: str, device: str) -> str:
        is_here = config.cluster.is_local or device == "auto"
        found = resolve_device(device) if is_here else torch.device(device)
        return str(resolve_dtype(wanted, found)).removeprefix("torch.")

    engine, trainer, placement = config.engine, config.trainer, config.placement
    num_engines = engine.num_local + config.evaluate.engines
    num_engines += sum(model.engine.num_local for model in config.environment.models.values())
    num_ranks = trainer.num_ranks * (1 if config.lora else max(1, len(config.policies)))
    # The cores of this host say nothing of others, where a process has those that it reserves.
    shared = available_cores() // (num_engines + num_ranks) if config.cluster.is_local else 1
    has_device = engine.num_local > 0 and not engine.attached
    engine_device = placement.engine(0) if has_device else placement.trainer[0]
    return config.updated(
        optimizer={"learning_rate": config.learning_rate},
        engine={"dtype": dtype(engine.dtype, engine_device)},
        trainer={"dtype": dtype(trainer.dtype, placement.trainer[0])},
        cluster={"threads": config.cluster.threads or max(1, shared)},
    )


def _distillation(config: RunConfig, specs: Sequence[ScorerSpec]) -> dict[str, Any]:
    """Keys of the loss that follow from the teachers. All teachers of a run must share them."""
    teachers = checks.teachers_in(specs)
    if not teachers or config.loss.get("type", DEFAULT) not in RECIPES:
        return {}
    first, kind = teachers[0]
    shared = _shared_settings(first, kind)
    for spec, other in teachers[1:]:
        for key, value in _shared_settings(spec, other).items():
            if value != shared[key]:
                raise ConfigError(
                    f"Scorers {first.name!r} and {spec.name!r} differ in {key} ({shared[key]!r} and"
                    f" {value!r}), and all teachers of a run share it; make it the same."
                )
    beta = {"distil_beta": kind.beta} if kind.loss == "jsd" else {}
    return {"distil": kind.loss, "distil_weight": first.weight, **beta}


def _shared_settings(spec: ScorerSpec, kind: Teacher | SelfTeacher) -> dict[str, Any]:
    return {"loss": kind.loss, "beta": kind.beta, "top_k": kind.num_top, "weight": spec.weight}
