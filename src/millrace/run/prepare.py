"""Everything that can be checked before a worker starts, checked.

Promise: what prepare() returns is enough to run, and every error it raises is one sentence about
the user's own input. It reads the model's tokenizer and configuration, never its weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config import RunConfig, ScorerConfig
from millrace.controller.controller import Cursor
from millrace.controller.orders import check_room
from millrace.core.errors import ConfigError, TaskError
from millrace.core.machine import available_cores
from millrace.core.protocols import Advantages, Capability
from millrace.core.records import Task
from millrace.environments.adapters.scorers import split_rewards
from millrace.environments.branching.recipe import Recipe
from millrace.environments.episode_runner import EnvironmentFunction
from millrace.environments.other_models import OtherModel
from millrace.environments.rollouts.renderer import Renderer
from millrace.inference.backend import check_capabilities, load_backend, seed_warnings
from millrace.journal import JournalHistory
from millrace.models.directory import (
    configured_context,
    has_experts,
    load_tokenizer,
    text_config,
)
from millrace.run.checks import (
    check_devices,
    check_estimator,
    check_filters,
    check_loss,
    check_roles,
    check_settings,
    check_teaching,
    teachers_in,
)
from millrace.run.environment import build_environment, others_of, recipe_of
from millrace.run.resume import advance_cursor, journal_history, resume_point
from millrace.scoring.advantages.estimators import CRITIC, TREE, build_advantages
from millrace.scoring.registry import ScorerSpec, check_scorers, function_scorer, resolve_scorer
from millrace.scoring.scorer_type import RunInfo
from millrace.scoring.shaping.selection import ROC
from millrace.scoring.shaping.shaping import Shaping, build_shaping
from millrace.scoring.teachers.reference import Reference
from millrace.scoring.teachers.teacher import SelfTeacher, Teacher
from millrace.tasks.sources import load_section, load_sources, make_stream
from millrace.tasks.streams import TaskStream
from millrace.training.checkpoints.directory import FoundCheckpoint
from millrace.training.losses.recipes import ADVANTAGES, DEFAULT, RECIPES, build_loss

PROMPTS_CHECKED = 64  # rendered at start; a run whose first prompts are all too long never begins


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    config: RunConfig  # with nothing left to "auto" that the controller decides
    tasks: TaskStream
    held_out: tuple[Task, ...]
    scorers: tuple[ScorerSpec, ...]
    advantages: Advantages
    shaping: Shaping
    tokenizer: Any
    renderer: Renderer
    environment: EnvironmentFunction | None  # None = one prompt, one completion
    recipe: Recipe | None
    others: Mapping[str, OtherModel]  # besides the policy, by name
    max_context: int
    checkpoint: Path | None  # to go on from
    cursor: Cursor
    past: JournalHistory | None  # what the journal says; None = there is to be no journal
    warnings: tuple[str, ...] = ()  # sentences to show when the run starts

    @property
    def model_path(self) -> str:
        """What engines load: the model of the config, or the checkpoint that stands for it."""
        is_whole = self.checkpoint is not None and self.config.lora is None
        return str(self.checkpoint) if is_whole else self.config.model.path

    @property
    def adapter_path(self) -> str | None:
        """What they put on top of it: the checkpoint of a LoRA run."""
        is_adapter = self.checkpoint is not None and self.config.lora is not None
        return str(self.checkpoint) if is_adapter else None

    @property
    def run_info(self) -> RunInfo:
        """What scorers need to know about the run."""
        model = self.config.model
        found = text_config(model.path, trust_remote_code=model.trust_remote_code)
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
    scorers: Sequence[Callable[..., Any]] | None = None,
    environment: Callable[..., Any] | None = None,
    resume: bool = False,
) -> PreparedRun:
    check_settings(config)
    sources = load_sources(config.tasks, tasks)
    train_tasks = [task for source in sources for task in source.tasks]
    held_out = load_section(config.evaluate, eval_tasks, section="evaluate")
    all_tasks = [*train_tasks, *held_out]
    specs = _scorers(config.scorers, scorers)
    specs, played = split_rewards(specs, build_environment(config, environment), tasks=all_tasks)
    rewards = environment is not None or config.environment.may_reward
    check_scorers(specs, all_tasks, may_be_empty=rewards)
    check_roles(config, specs, num_held_out=len(held_out))
    config = _with_distillation(_with_advantages(config), specs)
    _check_plugins(config, specs)
    advantages = build_advantages(config.scoring.advantages)
    shaping = _shaping(config, scorers=[spec.name for spec in specs])
    recipe = recipe_of(config, specs)
    # Files of the model are read from here on, which imports torch.
    model = config.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    _check_files(config)
    capabilities = _capabilities(config)
    max_context = _context(config)
    _check_critic(config, num_tokens=len(tokenizer), max_context=max_context)
    renderer = Renderer(tokenizer, template_settings=config.environment.template)
    renderer.check(all_tasks)
    _check_prompts(renderer, train_tasks, max_context=max_context)
    found, cursor = resume_point(config) if resume else (FoundCheckpoint(), Cursor())
    past, warnings = journal_history(config, cursor, resume=resume)
    stream = make_stream(sources, config.tasks, seed=config.seed)
    stream.restore(cursor.tasks)
    if past is not None:
        cursor = advance_cursor(cursor, past.ledger, stream)
    prepared = PreparedRun(
        config=_with_dtypes(_with_threads(config)),
        tasks=stream,
        held_out=tuple(held_out[: config.evaluate.max_tasks]),
        scorers=specs,
        advantages=advantages,
        shaping=shaping,
        tokenizer=tokenizer,
        renderer=renderer,
        environment=played,
        recipe=recipe,
        others=others_of(config, has_roles=played is not None),
        max_context=max_context,
        checkpoint=found.directory,
        cursor=cursor,
        past=past,
        warnings=(*found.refused, *warnings, *seed_warnings(config.engine, capabilities)),
    )
    _check_teachers(prepared)
    return prepared


def _check_plugins(config: RunConfig, specs: Sequence[ScorerSpec]) -> None:
    check_room(
        config.buffer.order,
        groups_per_step=config.trainer.groups_per_step,
        capacity=config.buffer.capacity,
        max_staleness=config.buffer.max_staleness,
    )
    loss = build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens)
    check_loss(config, loss)
    check_teaching(config, specs, loss=loss)
    check_filters(config)


def _check_teachers(prepared: PreparedRun) -> None:
    for spec in prepared.scorers:
        if isinstance(spec.type, Teacher | SelfTeacher | Reference):
            spec.type.check_model(prepared.run_info, name=spec.name)


def _capabilities(config: RunConfig) -> frozenset[Capability]:
    """What the engine backend offers, which must be all that the settings need."""
    capabilities, model = load_backend(config.engine).capabilities, config.model
    check_capabilities(
        config,
        capabilities,
        has_experts=has_experts(model.path, trust_remote_code=model.trust_remote_code),
    )
    return capabilities


def _check_files(config: RunConfig) -> None:
    """Devices and adapters. Imports torch, so it comes after the checks of settings."""
    from millrace.models.loading import resolve_device
    from millrace.models.lora.factors import require_peft
    from millrace.models.lora.folders import check_resident

    check_devices(config, resolve_device)
    if config.lora is not None:
        require_peft()
    if config.engine.count > 0:  # other hosts have folders of their own
        for name, folder in config.engine.adapters.items():
            check_resident(name, Path(folder))


def _scorers(
    settings: Sequence[ScorerConfig], given: Sequence[Callable[..., Any]] | None
) -> tuple[ScorerSpec, ...]:
    configured = [
        resolve_scorer(row, section=f"scorers.{index}") for index, row in enumerate(settings)
    ]
    return (*configured, *(function_scorer(function) for function in given or ()))


def _shaping(config: RunConfig, *, scorers: Sequence[str]) -> Shaping:
    selection = config.rollout.selection
    if selection.get("type", ROC) == ROC:  # what is solved is the same everywhere
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
    """A critic of its own must be able to read what the policy writes."""
    if config.critic is None or config.critic.path is None:
        return
    path = config.critic.path
    found = text_config(
        path, trust_remote_code=config.model.trust_remote_code, setting="critic.path"
    )
    if found.vocab_size < num_tokens:
        raise ConfigError(
            f"critic.path = {path!r} knows {found.vocab_size} tokens, but the policy has"
            f" {num_tokens}; choose a model with the tokenizer of model.path."
        )
    context = getattr(found, "max_position_embeddings", None)
    if context is not None and context < max_context:
        raise ConfigError(
            f"critic.path = {path!r} reads {context} tokens, but sequences may have {max_context};"
            " lower engine.max_context, or choose another model."
        )


def _with_advantages(config: RunConfig) -> RunConfig:
    """With the estimator that belongs to the loss, where nothing else is said."""
    table = {"type": "group", **config.scoring.advantages}
    if table["type"] != "auto":
        check_estimator(str(table["type"]), has_critic=config.critic is not None)
        return _with_estimator(config, table)
    if len(table) > 1:
        raise ConfigError(
            f"Section 'scoring.advantages' leaves its type to the loss but sets"
            f" {', '.join(key for key in table if key != 'type')}; set the type, too."
        )
    if config.critic is not None:
        return _with_estimator(config, {"type": CRITIC})
    if config.environment.recipe is not None:
        return _with_estimator(config, {"type": TREE})
    recipe = str(config.loss.get("type", DEFAULT))
    return _with_estimator(config, dict(ADVANTAGES.get(recipe, {"type": "group"})))


def _with_estimator(config: RunConfig, table: dict[str, Any]) -> RunConfig:
    scoring = config.scoring.model_copy(update={"advantages": table})
    return config.model_copy(update={"scoring": scoring})


def _context(config: RunConfig) -> int:
    """The longest sequence: what the model allows, or less if the config says so."""
    model = config.model
    limit = configured_context(model.path, trust_remote_code=model.trust_remote_code)
    wanted = config.engine.max_context
    if wanted is None and limit is None:
        raise ConfigError(
            f"Model {model.path!r} states no longest context; set engine.max_context."
        )
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigError(
            f"engine.max_context = {wanted} is more than the {limit} tokens that {model.path!r}"
            " allows; lower it."
        )
    context = wanted if wanted is not None else limit
    assert context is not None
    return context


def _check_prompts(renderer: Renderer, tasks: Sequence[Task], *, max_context: int) -> None:
    """A single bad prompt costs its own group. If all of the first are bad, the settings are."""
    first = tasks[:PROMPTS_CHECKED]
    lengths: list[int] = []
    refused: TaskError | None = None
    for task in first:
        try:
            lengths.append(len(renderer.render(task.prompt)))
        except TaskError as error:
            refused = error
    if refused is not None and not lengths:
        raise ConfigError(f"Each of the first {len(first)} prompts is refused: {refused}")
    if lengths and refused is None and min(lengths) >= max_context:
        raise ConfigError(
            f"Each of the first {len(first)} prompts has at least {min(lengths)}"
            f" tokens, but the context holds {max_context}; shorten the prompts or raise"
            " engine.max_context."
        )


def _with_threads(config: RunConfig) -> RunConfig:
    """Cores shared out evenly among all engines and the trainer, where nothing else is said."""
    models = config.environment.models
    num_engines = config.engine.count + config.evaluate.engines
    num_engines += sum(model.engine.count for model in models.values())
    share = max(1, available_cores() // (num_engines + 1))
    others = {
        name: model.model_copy(update={"threads": model.engine.threads or share})
        for name, model in models.items()
    }
    return config.model_copy(
        update={
            "environment": config.environment.model_copy(update={"models": others}),
            "engine": config.engine.model_copy(update={"threads": config.engine.threads or share}),
            "trainer": config.trainer.model_copy(
                update={"threads": config.trainer.threads or share}
            ),
        }
    )


def _with_dtypes(config: RunConfig) -> RunConfig:
    """Data types that fit the devices of this host, where the settings say "auto". All engines
    use the same one, those of other hosts included: weights travel in it."""
    from millrace.models.loading import resolve_device, resolve_dtype

    def chosen(dtype: str, device: str) -> str:
        return str(resolve_dtype(dtype, resolve_device(device))).removeprefix("torch.")

    placement, engine, trainer = config.placement, config.engine, config.trainer
    has_engines_here = engine.count > 0
    device = placement.engine(0) if has_engines_here else placement.trainer[0]
    dtypes = {
        "engine": engine.model_copy(update={"dtype": chosen(engine.dtype, device)}),
        "trainer": trainer.model_copy(
            update={"dtype": chosen(trainer.dtype, placement.trainer[0])}
        ),
    }
    return config.model_copy(update=dtypes)


def _with_distillation(config: RunConfig, specs: Sequence[ScorerSpec]) -> RunConfig:
    """With the teachers' settings of the loss, where [loss] does not set them."""
    found = teachers_in(specs)
    if not found or config.loss.get("type", DEFAULT) not in RECIPES:
        return config
    (first, teacher), *others = found
    mine = _teaching(first, teacher)
    for spec, other in others:
        for key, value in _teaching(spec, other).items():
            if value != mine[key]:
                raise ConfigError(
                    f"Scorers {first.name!r} and {spec.name!r} differ in {key} ({mine[key]!r} and"
                    f" {value!r}), and all teachers of a run share it; make it the same."
                )
    implied: dict[str, Any] = {"distil": teacher.loss, "distil_weight": first.weight}
    if teacher.loss == "jsd":
        implied["distil_beta"] = teacher.beta
    return config.model_copy(update={"loss": {**implied, **config.loss}})


def _teaching(spec: ScorerSpec, kind: Teacher | SelfTeacher) -> dict[str, Any]:
    """The settings that all teachers of a run must share."""
    return {"loss": kind.loss, "beta": kind.beta, "top_k": kind.num_top, "weight": spec.weight}
