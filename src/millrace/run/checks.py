"""Checks between settings: each raises ConfigError with the settings, their values and the remedy.

Promise: a combination that cannot work is refused before any worker starts, and before torch is
imported where no file of a model is needed. Torch-free.
"""

import inspect
from collections.abc import Sequence

from millrace.config import RunConfig, TaskPlace
from millrace.config.training import OPTIMIZERS, OptimizerConfig
from millrace.core.errors import ConfigError, suggestion
from millrace.core.plugins import load_reference
from millrace.core.records import Sampling
from millrace.monitoring.trackers import build_tracker
from millrace.run.cluster import check_cluster
from millrace.run.mesh_checks import check_mesh
from millrace.scoring.advantages import CRITIC, PAIRS
from millrace.scoring.pool import ScorerSpec
from millrace.scoring.reward_models.reward_model import ProcessRewardModel, RewardModelSettings
from millrace.scoring.teachers.process import LogprobModelSettings
from millrace.scoring.teachers.teacher import Reference, SelfTeacher, Teacher
from millrace.training.losses.loss import Loss
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.recipes import PREFERENCE, PreferenceLoss

TeacherSpecs = Sequence[tuple[ScorerSpec, Teacher | SelfTeacher]]


def check_settings(config: RunConfig, *, trains: bool = True) -> None:
    """Check what needs nothing but the settings. `trains`: there is a trainer."""
    check_tasks(config)
    for check in (_evaluation, _steps, _buffer, _replay, _engines, _adapters, check_mesh):
        check(config)
    _fidelity(config, trains=trains)
    check_cluster(config)


def check_plugins(config: RunConfig) -> None:
    """Check plug-ins that only other processes build: trackers and optimizers."""
    for table in config.tracker:
        build_tracker(table.type_settings)
    own = {f"policies.{name}.optimizer": row.optimizer for name, row in config.policies.items()}
    for section, table in own.items():
        _optimizer(OptimizerConfig.model_validate(table), section=section)
    if not own:
        _optimizer(config.optimizer, section="optimizer")


def _optimizer(config: OptimizerConfig, *, section: str) -> None:
    """A class of the user's own must exist and take the further keys of its table."""
    if config.type in OPTIMIZERS:
        return
    try:
        cls = load_reference(config.type)
    except ConfigError as error:
        raise ConfigError(f"{section}.type = {config.type!r}: {error}") from None
    try:
        inspect.signature(cls).bind([], lr=0.0, **config.type_arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Section '{section}' does not fit {config.type!r}: {error}.") from None


def check_tasks(config: RunConfig) -> None:
    _task_place("tasks", config.tasks)
    _task_place("evaluate", config.evaluate)
    for name, row in config.tasks.source.items():
        _task_place(f"tasks.source.{name}", row)
        if not row.is_named:
            raise ConfigError(
                f"[tasks.source.{name}] has neither a path nor a generator; set one of them."
            )
    if config.tasks.source and config.tasks.is_named:
        raise ConfigError(
            "tasks.source is set beside tasks.path or tasks.generator; make that one a"
            " [tasks.source.NAME], too."
        )


def _task_place(section: str, place: TaskPlace) -> None:
    if place.path is not None and place.generator is not None:
        raise ConfigError(f"{section}.path and {section}.generator are both set; keep one.")
    if place.path is None and place.columns is not None:
        raise ConfigError(
            f"{section}.columns = {place.columns!r} needs a path, and there is none; remove it."
        )


def _evaluation(config: RunConfig) -> None:
    samples = config.evaluate.samples
    if samples > 1 and config.evaluate.temperature == 0:
        raise ConfigError(
            f"evaluate.samples = {samples} at evaluate.temperature = 0 are all the same; raise the"
            " temperature, or set evaluate.samples to 1."
        )


def _steps(config: RunConfig) -> None:
    if config.tasks.epochs is not None:
        raise ConfigError("tasks.epochs is for `millrace sft`; remove it, and set trainer.steps.")
    groups = f"trainer.groups_per_step = {config.trainer.groups_per_step}"
    if config.buffer_capacity < config.trainer.groups_per_step:
        raise ConfigError(
            f"buffer.capacity = {config.buffer.capacity!r} cannot hold the {groups} that a step"
            " takes; raise buffer.capacity."
        )
    if config.trainer.minibatches > config.trainer.groups_per_step:
        raise ConfigError(
            f"trainer.minibatches = {config.trainer.minibatches} is more than {groups}, so some"
            " would have no group; lower it."
        )


def _buffer(config: RunConfig) -> None:
    buffer = config.buffer
    if config.weights.interrupt == "barrier" and buffer.max_staleness != 0:
        raise ConfigError(
            "weights.interrupt = 'barrier' alternates generation and training, which"
            f" buffer.max_staleness = {buffer.max_staleness} does not; set buffer.max_staleness to"
            " 0, or choose another weights.interrupt."
        )
    if config.weights.interrupt == "barrier" and buffer.limit.only_at_take:
        raise ConfigError(
            "weights.interrupt = 'barrier' paces generation by the staleness limit, which"
            " buffer.staleness with enforce = 'take' does not; remove that key, or choose another"
            " weights.interrupt."
        )


def _replay(config: RunConfig) -> None:
    replay, groups = config.buffer.replay, config.trainer.groups_per_step
    if replay is None:
        return
    if config.weights.interrupt == "barrier":
        raise ConfigError(
            "weights.interrupt = 'barrier' is strictly on-policy, which buffer.replay is not;"
            " remove buffer.replay, or choose another weights.interrupt."
        )
    if replay.groups_of(groups) == 0:
        raise ConfigError(
            f"buffer.replay.share = {replay.share} of trainer.groups_per_step = {groups} is less"
            f" than one group; raise it to {1 / groups:.3g} or more."
        )


def _engines(config: RunConfig) -> None:
    if config.engine.num_local + config.engine.remote < 1:
        raise ConfigError("engine.count = 0 and engine.remote = 0 leave no engine; raise one.")
    most, first = config.engine.max_count, config.engine.num_local + config.engine.remote
    if most is not None and most < first:
        raise ConfigError(
            f"engine.max_count = {most} is less than the {first} engines that the run starts with;"
            " raise it, or lower engine.count."
        )
    if config.weights.notify and config.weights.transport != "disk":
        raise ConfigError(
            f"weights.notify announces files, and weights.transport = {config.weights.transport!r}"
            " writes none; set it to 'disk'."
        )
    if ":" in config.weights.transport:
        from millrace.weights.transport import load_transport  # imports torch

        load_transport(config.weights.transport)


def _adapters(config: RunConfig) -> None:
    adapters = config.engine.adapters
    if "base" in adapters or "" in adapters:
        raise ConfigError(
            "engine.adapters has an adapter named 'base', which means the model without an adapter,"
            " or one without a name; choose another name."
        )
    if adapters and config.lora is not None and config.lora.apply == "merged":
        raise ConfigError(
            "lora.apply = 'merged' leaves no base weights for engine.adapters"
            f" ({', '.join(adapters)}); set it to 'unmerged'."
        )
    if config.lora is not None and config.trainer.router_bias_rate:
        raise ConfigError(
            f"trainer.router_bias_rate = {config.trainer.router_bias_rate} changes routers, and"
            " [lora] publishes nothing but its adapter; set it to 0."
        )


def _fidelity(config: RunConfig, *, trains: bool) -> None:
    if not config.is_exact:
        return
    trainer, engine = config.trainer, config.engine
    engines, trainers = config.placement.engines, config.placement.trainer
    obstacles = {
        f"engine.type = {engine.type!r}": engine.type != "embedded",
        f"FP8 in engine.options ({', '.join(engine.in_fp8)})": bool(engine.in_fp8),
        "[lora]": config.lora is not None,
        f"engine.adapters ({', '.join(engine.adapters)})": bool(engine.adapters),
        f"trainer.ranks = {trainer.ranks}": trainer.ranks != 1,
        f"trainer.mesh.dp_shard = {trainer.mesh.dp_shard}": trainer.is_sharded,
        f"engine.dtype = {engine.dtype!r} beside trainer.dtype = {trainer.dtype!r}": (
            engine.dtype != trainer.dtype
        ),
        f"placement.engines = {[*engines]} beside placement.trainer = {[*trainers]}": (
            trains
            and len({device == "cpu" for device in (*engines, *trainers) if device != "auto"}) > 1
        ),
    }
    if obstacle := next((name for name, is_set in obstacles.items() if is_set), None):
        raise ConfigError(
            f"fidelity.mode = 'exact' does not support {obstacle}, which computes in another order"
            " or precision; change it, or set fidelity.mode to 'fast'."
        )


def check_roles(config: RunConfig, specs: Sequence[ScorerSpec], *, num_held_out: int) -> None:
    if config.evaluate.engines > 0 and num_held_out == 0:
        raise ConfigError(
            f"evaluate.engines = {config.evaluate.engines} have no tasks to evaluate; set"
            " evaluate.path, or pass eval_tasks=[...] to train()."
        )
    # Without any scorer, the environment rewards.
    if num_held_out and specs and not any(_gives_scores(spec) for spec in specs):
        raise ConfigError(
            f"There are {num_held_out} held-out tasks and no scorer that says whether they are"
            " solved; add one (with loss.reward_weight = 0 it is not trained on), or remove"
            " [evaluate]."
        )
    names = [
        spec.name
        for spec in specs
        if isinstance(spec.type, RewardModelSettings | LogprobModelSettings)
    ]
    models = config.environment.models
    for name, devices in config.placement.models.items():
        if name not in (*models, *names):
            hint = suggestion(name, [*models, *names], otherwise="models besides the policy")
            raise ConfigError(
                f"placement.models.{name} names none of environment.models, and no scorer that is a"
                f" model; {hint}"
            )
        if name not in models and len(devices) > 1:
            raise ConfigError(
                f"placement.models.{name} lists {len(devices)} devices, and a scorer runs on one;"
                " keep one."
            )


def _gives_scores(spec: ScorerSpec) -> bool:
    if isinstance(spec.type, ProcessRewardModel):
        return spec.type.score is not None
    return not isinstance(spec.type, LogprobModelSettings)


def check_estimator(estimator: str, *, has_critic: bool) -> None:
    if has_critic and estimator != CRITIC:
        raise ConfigError(
            f"scoring.advantages of type {estimator!r} needs no critic, and [critic] is set; remove"
            f" [critic], or set the type to '{CRITIC}' or 'auto'."
        )
    if estimator == CRITIC and not has_critic:
        raise ConfigError(
            f"scoring.advantages of type '{CRITIC}' needs a critic, and there is none; add a"
            " [critic] table, or set the type to 'auto'."
        )


def check_filters(config: RunConfig) -> None:
    for table in config.rollout.filter:
        kind = table.get("type", "zero_variance")
        if kind == "zero_variance" and config.critic is not None:
            raise ConfigError(
                "rollout.filter 'zero_variance' drops groups that all failed or all succeeded, from"
                " which a critic learns; remove the filter or [critic]."
            )
        masks = kind == "overlong" and table.get("action", "mask") == "mask"
        if masks and config.scoring.advantages["type"] == PAIRS:
            raise ConfigError(
                "rollout.filter 'overlong' with action = 'mask' would leave half of a pair, which"
                f" scoring.advantages of type '{PAIRS}' makes; set its action to 'drop'."
            )


def check_loss(config: RunConfig, loss: Loss) -> None:
    replay = config.buffer.replay
    if replay is not None and isinstance(loss, PolicyLoss):
        limit = loss.staleness.max_token_staleness
        # Every token of a replayed group is at least two versions stale.
        if limit < 2 and loss.staleness.staleness_half_life == 0:
            raise ConfigError(
                f"loss.max_token_staleness = {limit:g} masks every token of buffer.replay, which"
                f" are 2 to {replay.max_staleness} versions stale; raise it, set"
                " loss.staleness_half_life, or remove buffer.replay."
            )
    if not isinstance(loss, PreferenceLoss):
        return
    if config.critic is not None:
        raise ConfigError(
            f"loss.type = '{PREFERENCE}' learns from pairs, and a critic judges single episodes;"
            " remove [critic], or set loss.type to 'ppo'."
        )
    estimator = config.scoring.advantages["type"]
    if estimator != PAIRS:
        raise ConfigError(
            f"loss.type = '{PREFERENCE}' learns from pairs, but scoring.advantages of type"
            f" {estimator!r} makes none; set that to '{PAIRS}' or 'auto'."
        )


def teachers_in(specs: Sequence[ScorerSpec]) -> list[tuple[ScorerSpec, Teacher | SelfTeacher]]:
    return [(s, s.type) for s in specs if isinstance(s.type, Teacher | SelfTeacher)]


def check_teaching(config: RunConfig, specs: Sequence[ScorerSpec], *, loss: Loss) -> None:
    """The loss must use every teacher and reference, and must have those that it needs."""
    teachers = teachers_in(specs)
    if isinstance(loss, PolicyLoss):
        _distillation(config, teachers, loss)
    elif teachers and isinstance(loss, PreferenceLoss):
        raise ConfigError(
            f"Scorer {teachers[0][0].name!r} teaches, but loss.type = '{PREFERENCE}' learns from"
            " pairs alone; choose another loss, or remove the teacher."
        )
    _reference(specs, loss)
    if teachers and len(specs) == sum(isinstance(s.type, LogprobModelSettings) for s in specs):
        _without_scores(config, teacher=teachers[0][0].name)


def _distillation(config: RunConfig, teachers: TeacherSpecs, loss: PolicyLoss) -> None:
    distil = loss.distil.distil
    if teachers and not loss.distil.is_on:
        raise ConfigError(
            f"Scorer {teachers[0][0].name!r} teaches, but loss.distil = 'none' ignores it; remove"
            " that setting, or the scorer."
        )
    if loss.distil.is_on and not teachers:
        raise ConfigError(
            f"loss.distil = {distil!r} learns from a teacher, and there is none; add one to scorers"
            " (type 'teacher' or 'self_teacher'), or choose another loss."
        )
    if not loss.distil.needs_topk:
        return
    for spec, kind in teachers:
        if kind.num_top == 0:
            raise ConfigError(
                f"loss.distil = {distil!r} compares distributions, and scorer {spec.name!r} returns"
                " none; set its top_k."
            )
    if Sampling(**config.sampling.model_dump()).truncates:
        raise ConfigError(
            f"loss.distil = {distil!r} compares whole distributions, and sampling.top_k, top_p or"
            " min_p truncate the policy's; turn them off, or set loss.distil to 'reverse_kl'."
        )


def _reference(specs: Sequence[ScorerSpec], loss: Loss) -> None:
    references = [spec.name for spec in specs if isinstance(spec.type, Reference)]
    if len(references) > 1:
        raise ConfigError(
            f"Scorers {references[0]!r} and {references[1]!r} are both a reference, and a run has"
            " at most one; remove one."
        )
    if isinstance(loss, PolicyLoss):
        wants, setting = loss.needs_reference, f"loss.kl = {loss.kl.kl}"
    elif isinstance(loss, PreferenceLoss):
        wants, setting = loss.needs_reference, "loss.reference = 'reference'"
    else:
        return  # a loss of the user's own knows what it needs
    if wants and not references:
        raise ConfigError(
            f"{setting} compares with a reference model, and the run has none; add one to scorers"
            " (type = 'reference')."
        )
    if references and not wants:
        raise ConfigError(
            f"Scorer {references[0]!r} is a reference that nothing compares with; set loss.kl, or"
            " remove it."
        )


def _without_scores(config: RunConfig, *, teacher: str) -> None:
    """All scores are 0 then: what depends on their differences cannot work."""
    conflicts = [
        f"rollout.filter of type {table['type']!r} would drop every group"
        for table in config.rollout.filter
        if table.get("type") == "zero_variance"
    ]
    if config.scoring.advantages["type"] == PAIRS:
        conflicts.append(f"scoring.advantages of type '{PAIRS}' would find no pairs")
    if config.critic is not None:
        conflicts.append("[critic] would learn that every value is 0")
    if config.tasks.order == "curriculum":
        conflicts.append("tasks.order = 'curriculum' would count every task as unsolved")
    if conflicts:
        raise ConfigError(
            f"Scorer {teacher!r} gives no scores, and there is no other, so {conflicts[0]}; remove"
            " that setting, or add a scorer that gives scores."
        )
