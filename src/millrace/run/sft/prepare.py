"""Checks the settings and the data of supervised fine-tuning, before any worker starts.

Sections about generation ([scorers], [sampling], [engine], ...) are ignored, so a file may hold the
settings of both commands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.config import EngineConfig, JournalConfig, RunConfig, WeightsConfig
from millrace.core.errors import ConfigError
from millrace.environments.rollouts.renderer import Renderer
from millrace.inference.backend import load_backend
from millrace.run.checks import check_tasks, check_trackers
from millrace.run.cluster import check_cluster
from millrace.run.mesh_checks import check_mesh
from millrace.run.prepare import (
    PreparedRun,
    check_files,
    place,
    read_model,
    with_sections,
)
from millrace.run.resume import find_resume_point
from millrace.run.sft.examples import ExampleEncoder, SupervisedData, check_examples
from millrace.tasks.sources import load_section, load_sources, make_stream
from millrace.training.losses.recipes import SUPERVISED

FULL_LEARNING_RATE = 1e-5
LORA_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSft(PreparedRun):
    data: SupervisedData


def prepare_sft(
    config: RunConfig,
    *,
    tasks: Sequence[Any] | None = None,
    eval_tasks: Sequence[Any] | None = None,
    resume: bool = False,
) -> PreparedSft:
    given, config = config, supervised_settings(config)
    check_tasks(config)
    check_mesh(config)
    check_cluster(config)
    _check_trainer(config)
    sources = load_sources(config.tasks, tasks)
    train_tasks = [task for source in sources for task in source.tasks]
    held_out = load_section(config.evaluate, eval_tasks, section="evaluate")
    check_examples([*train_tasks, *held_out])
    check_trackers(config)
    config, num_examples = _with_steps(config, num_tasks=len(train_tasks))
    # Files of the model are read from here on, which imports torch.
    tokenizer, max_tokens = read_model(config.model, wanted=config.engine.max_context)
    config, processes, devices = place(config, ())
    check_files(config, load_backend(config.engine).capabilities)
    renderer = Renderer(tokenizer, template_settings=config.environment.template)
    renderer.check([*train_tasks, *held_out])
    stream = make_stream(sources, config.tasks, seed=config.seed)
    point = find_resume_point(config, stream, resume=resume)
    size = config.trainer.groups_per_step
    if point.cursor.next_number != point.cursor.version * size:
        raise ConfigError(
            f"{config.run_dir} was begun with another trainer.groups_per_step than {size}, or by"
            " `millrace train`; resume it as it was begun."
        )
    return PreparedSft(
        config=config,
        given=given,
        processes=processes,
        devices=devices,
        tasks=stream,
        held_out=tuple(held_out[: config.evaluate.max_tasks]),
        tokenizer=tokenizer,
        renderer=renderer,
        max_context=max_tokens,
        checkpoint=point.checkpoint,
        cursor=point.cursor,
        history=None,
        warnings=point.warnings,
        data=SupervisedData(
            config=config,
            stream=stream,
            num_examples=num_examples,
            encoder=ExampleEncoder(renderer, eos_id=tokenizer.eos_token_id, max_tokens=max_tokens),
        ),
    )


def supervised_settings(config: RunConfig) -> RunConfig:
    """The settings without what generation needs, and with the loss of fine-tuning."""
    rate = config.optimizer.learning_rate
    if rate == "auto":
        rate = FULL_LEARNING_RATE if config.lora is None else LORA_LEARNING_RATE
    config = config.model_copy(
        update={
            "loss": {"type": SUPERVISED},
            "scorers": (),
            "critic": None,
            "engine": EngineConfig(count=0, max_context=config.engine.max_context),
            "weights": WeightsConfig(),
            "journal": JournalConfig(max_bytes=0),  # a step's batch follows from its number
        }
    )
    return with_sections(
        config,
        optimizer={"learning_rate": rate},
        environment={"models": {}, "remote": 0},
        evaluate={"engines": 0},
    )


def _check_trainer(config: RunConfig) -> None:
    trainer = config.trainer
    refused = {
        "trainer.epochs": (trainer.epochs, 1, "passes over the data are tasks.epochs"),
        "trainer.minibatches": (trainer.minibatches, 1, "a step has one batch"),
        "trainer.router_aux_loss": (trainer.router_aux_loss, 0, "no engine records expert routes"),
        "tasks.order": (config.tasks.order == "curriculum", False, "a curriculum needs scores"),
    }
    for setting, (found, wanted, reason) in refused.items():
        if found != wanted:
            raise ConfigError(f"{setting} does not fit `millrace sft`: {reason}; leave it out.")


def _with_steps(config: RunConfig, *, num_tasks: int) -> tuple[RunConfig, int]:
    """The settings with the number of steps, and the number of examples that these take."""
    size, epochs = config.trainer.groups_per_step, config.tasks.epochs
    if epochs is None:
        return config, config.trainer.steps * size
    num_examples = max(1, round(epochs * num_tasks))
    steps = math.ceil(num_examples / size)
    return with_sections(config, trainer={"steps": steps}), num_examples
