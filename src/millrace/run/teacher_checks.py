"""How the teachers of a run and its other settings go together.

Promise: a run whose teacher would teach nothing, or whose loss lacks one, does not start; what is
wrong is one sentence.
"""

from collections.abc import Sequence

from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.records import Sampling
from millrace.scoring.advantages.estimators import PAIRS
from millrace.scoring.registry import ScorerSpec
from millrace.scoring.reward_models.process_reward_model import ProcessRewardModel
from millrace.scoring.scorer_type import RunInfo
from millrace.scoring.teachers.reference import Reference
from millrace.scoring.teachers.settings import LogprobModelSettings
from millrace.scoring.teachers.teacher import SelfTeacher, Teacher
from millrace.training.losses.loss import Loss
from millrace.training.losses.policy_loss import PolicyLoss
from millrace.training.losses.preference import PreferenceLoss
from millrace.training.losses.recipes import DEFAULT, PREFERENCE, RECIPES


def with_distillation(config: RunConfig, specs: Sequence[ScorerSpec]) -> RunConfig:
    """With what teachers say about the loss, where [loss] says nothing."""
    found = _teachers(specs)
    if not found or config.loss.get("type", DEFAULT) not in RECIPES:
        return config
    (first, kind), *others = found
    mine = _learning(first, kind)
    for spec, other in others:
        for key, value in _learning(spec, other).items():
            if value != mine[key]:
                raise ConfigError(
                    f"Scorers {first.name!r} and {spec.name!r} differ in {key} ({mine[key]!r} and"
                    f" {value!r}), and a run learns from all its teachers alike; make it the same."
                )
    told = {"distil": kind.loss, "distil_weight": first.weight}
    if kind.loss == "jsd":
        told["distil_beta"] = kind.beta
    return config.model_copy(update={"loss": {**told, **config.loss}})


def check_teaching(config: RunConfig, specs: Sequence[ScorerSpec], *, loss: Loss) -> None:
    """That what is said is learned from, and what is learned from is said."""
    teachers = _teachers(specs)
    if isinstance(loss, PolicyLoss):
        _check_distillation(config, teachers, loss)
    elif teachers and isinstance(loss, PreferenceLoss):
        raise ConfigError(
            f"Scorer {teachers[0][0].name!r} teaches, but loss.type = '{PREFERENCE}' learns from"
            " pairs alone; choose another loss, or leave the teacher out."
        )
    _check_reference(specs, loss)
    if teachers and len(specs) == sum(isinstance(s.type, LogprobModelSettings) for s in specs):
        _check_without_scores(config, teacher=teachers[0][0].name)


def check_models(specs: Sequence[ScorerSpec], run: RunInfo) -> None:
    for spec in specs:
        if isinstance(spec.type, Teacher | SelfTeacher | Reference):
            spec.type.check_model(run, name=spec.name)


def check_evaluation(specs: Sequence[ScorerSpec], *, num_held_out: int) -> None:
    # Without any scorer, an environment rewards.
    if num_held_out and specs and not any(_gives_scores(spec) for spec in specs):
        raise ConfigError(
            f"There are {num_held_out} held-out tasks and no scorer that says whether they are"
            " solved; add one (with loss.reward_weight = 0 it is not learned from), or leave out"
            " [evaluate]."
        )


def _gives_scores(spec: ScorerSpec) -> bool:
    if isinstance(spec.type, ProcessRewardModel):
        return spec.type.score is not None
    return not isinstance(spec.type, LogprobModelSettings)


def _check_distillation(
    config: RunConfig,
    teachers: Sequence[tuple[ScorerSpec, Teacher | SelfTeacher]],
    loss: PolicyLoss,
) -> None:
    distil = loss.distil.distil
    if teachers and not loss.distil.is_on:
        raise ConfigError(
            f"Scorer {teachers[0][0].name!r} teaches, but loss.distil = 'none' learns nothing from"
            " it; leave that out, or the scorer."
        )
    if loss.distil.is_on and not teachers:
        raise ConfigError(
            f"loss.distil = {distil!r} learns from a teacher, and there is none; add a [[scorer]]"
            " of type 'teacher' or 'self_teacher', or choose another loss."
        )
    if not loss.distil.needs_topk:
        return
    for spec, kind in teachers:
        if kind.num_top == 0:
            raise ConfigError(
                f"loss.distil = {distil!r} compares distributions, and scorer {spec.name!r} tells"
                " none of them; set its top_k."
            )
    sampling = Sampling(**config.sampling.model_dump())
    if sampling.truncates:
        raise ConfigError(
            f"loss.distil = {distil!r} compares whole distributions, and sampling.top_k, top_p or"
            " min_p cut the policy's; turn them off, or set loss.distil to 'reverse_kl'."
        )


def _check_reference(specs: Sequence[ScorerSpec], loss: Loss) -> None:
    references = [spec.name for spec in specs if isinstance(spec.type, Reference)]
    if len(references) > 1:
        raise ConfigError(
            f"Scorers {references[0]!r} and {references[1]!r} are both a reference, and a policy"
            " can stay close to one; leave one out."
        )
    wants, setting = False, ""
    if isinstance(loss, PolicyLoss):
        wants, setting = loss.needs_reference, f"loss.kl = {loss.kl.kl}"
    elif isinstance(loss, PreferenceLoss):
        wants, setting = loss.needs_reference, "loss.reference = 'reference'"
    else:
        return  # what a loss of the user's own wants, it knows itself
    if wants and not references:
        raise ConfigError(
            f"{setting} compares with a reference model, and the run has none; add a [[scorer]]"
            " with type = 'reference'."
        )
    if references and not wants:
        raise ConfigError(
            f"Scorer {references[0]!r} is a reference that nothing compares with; set loss.kl, or"
            " leave it out."
        )


def _check_without_scores(config: RunConfig, *, teacher: str) -> None:
    """Scores are all 0 then: what lives by their differences would starve."""
    starving = [
        f"rollout.filter of type {table['type']!r} would drop every group"
        for table in config.rollout.filter
        if table.get("type") == "zero_variance"
    ]
    if config.scoring.advantages["type"] == PAIRS:
        starving.append(f"scoring.advantages of type '{PAIRS}' would find no pairs")
    if config.critic is not None:
        starving.append("[critic] would learn that nothing is worth anything")
    if config.tasks.order == "curriculum":
        starving.append("tasks.order = 'curriculum' would take every task for unsolved")
    if starving:
        raise ConfigError(
            f"Scorer {teacher!r} gives no scores, and there is no other, so {starving[0]}; leave"
            " that out, or add a scorer that gives some."
        )


def _teachers(specs: Sequence[ScorerSpec]) -> list[tuple[ScorerSpec, Teacher | SelfTeacher]]:
    return [(s, s.type) for s in specs if isinstance(s.type, Teacher | SelfTeacher)]


def _learning(spec: ScorerSpec, kind: Teacher | SelfTeacher) -> dict[str, object]:
    """What a teacher says about how it is learned from."""
    return {"loss": kind.loss, "beta": kind.beta, "top_k": kind.num_top, "weight": spec.weight}
