"""Training on the demo's task in one process with data of exact staleness, to compare losses.

Batch N is sampled by version max(0, N - staleness) and trained at version N, as if it had waited in
a full buffer. Engine, packing and trainer are those of a real run, but they take turns, so
staleness does not depend on speed.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.config import EngineConfig, RunConfig, load_config
from millrace.core.records import (
    Completion,
    Episode,
    Group,
    Request,
    Rollout,
    Sampling,
    Score,
    Task,
)
from millrace.demo.model import NUM_EXAMPLES, make_model
from millrace.demo.task import exact, make_tasks
from millrace.environments.rollouts.player import group_seed
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.token_record import rollout_of
from millrace.inference.backend import EngineSpec
from millrace.inference.embedded.build import build_engine
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.models.directory import load_tokenizer
from millrace.scoring.advantages import GroupAdvantages
from millrace.training.build import build_trainer
from millrace.training.packing.packer import pack

GREEDY = Sampling(max_new_tokens=10, temperature=0.0)
QUICK: dict[str, Any] = {"steps": 3, "groups_per_step": 2, "num_held_out": 8}  # to try it out
_QUICK_EXAMPLES = 64  # for the warm start


@dataclass(frozen=True, kw_only=True, slots=True)
class LockstepSettings:
    """Defaults make the task hard and the run long enough to show differences between losses."""

    loss: dict[str, Any]
    staleness: int = 0  # versions between sampling and training
    seed: int = 0
    steps: int = 120
    learning_rate: float = 1.5e-4
    groups_per_step: int = 16
    group_size: int = 8
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=10))
    num_digits: tuple[int, ...] = (3, 4, 5)
    num_held_out: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class LockstepResult:
    accuracy: float  # greedy, on held-out tasks
    rows: list[dict[str, float]]  # metrics of each step

    def mean(self, name: str, *, first: int = 0) -> float:
        """Mean of a metric from step `first` on. A step without the metric counts as 0."""
        return float(np.mean([row.get(name, 0.0) for row in self.rows[first:]]))


def warm_start_model(folder: Path, *, seed: int, quick: bool) -> Path:
    """The demo's warm-started model of a seed; made once and kept in `folder`."""
    model = folder / str(seed)
    if not model.exists():
        make_model(model, seed, num_examples=_QUICK_EXAMPLES if quick else NUM_EXAMPLES)
    return model


def train(
    model: Path,
    settings: LockstepSettings,
    *,
    transform: Callable[[Rollout], Rollout] = lambda rollout: rollout,
) -> LockstepResult:
    """`transform` changes each rollout before the trainer gets it."""
    torch.set_num_threads(1)
    config = _config(model, settings)
    sampler = _LockstepSampler(model, config=config.engine, settings=settings)
    trainer = build_trainer(config, path=str(model))
    waiting: deque[list[Group]] = deque()
    rows: list[dict[str, float]] = []
    for version in range(settings.steps):
        while len(waiting) <= settings.staleness:
            waiting.append(sampler.sample_batch())
        groups = [_transformed(group, transform) for group in waiting.popleft()]
        batch = pack(
            groups,
            microbatch_tokens=config.trainer.microbatch_tokens,
            whole_groups=bool(settings.loss.get("minimum_variance_baseline")),
        )
        metrics = trainer.step(batch)
        ages = np.concatenate([version - m.versions for m in batch.microbatches])
        rewards = [score.total for group in groups for score in group.scores]
        rows.append({**metrics, "staleness": ages.mean(), "reward": float(np.mean(rewards))})
        sampler.engine.swap(trainer.policy.weights(), version=version + 1)
    return LockstepResult(accuracy=sampler.accuracy(), rows=rows)


class _LockstepSampler:
    """Samples and scores groups of the training tasks, and of the held-out tasks."""

    def __init__(self, model: Path, *, config: EngineConfig, settings: LockstepSettings) -> None:
        digits = settings.num_digits
        num_tasks = settings.groups_per_step * (settings.steps + settings.staleness)
        self.engine: EmbeddedEngine = build_engine(
            EngineSpec(config=config, device="cpu", model_path=str(model), version=0)
        )
        self._renderer = Renderer(load_tokenizer(str(model), trust_remote_code=False))
        self._settings = settings
        self._tasks = _tasks(make_tasks(num_tasks, settings.seed, num_digits=digits))
        self._held_out = _tasks(
            make_tasks(settings.num_held_out, seed=0, held_out=True, num_digits=digits)
        )
        self._next = 0

    def sample_batch(self) -> list[Group]:
        numbers = range(self._next, self._next + self._settings.groups_per_step)
        self._next = numbers.stop
        tasks = [self._tasks[number] for number in numbers]
        seeds = [group_seed(self._settings.seed, number) for number in numbers]
        return self._sample(
            tasks, seeds=seeds, n=self._settings.group_size, sampling=self._settings.sampling
        )

    def accuracy(self) -> float:
        seeds = [0] * len(self._held_out)
        groups = self._sample(self._held_out, seeds=seeds, n=1, sampling=GREEDY)
        return float(np.mean([group.scores[0].total for group in groups]))

    def _sample(
        self, tasks: list[Task], *, seeds: list[int], n: int, sampling: Sampling
    ) -> list[Group]:
        prompts = [self._renderer.render(task.prompt) for task in tasks]
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            self.engine.add_request(
                Request(id=str(number), prompt=prompt, sampling=sampling, n=n, seed=seed)
            )
        ended: dict[str, dict[int, Completion]] = {}
        while self.engine.has_work:
            for one in self.engine.step():
                ended.setdefault(one.id, {}).update(one.completions)
        done = {id: [own[i] for i in sorted(own)] for id, own in ended.items()}
        return [
            _scored(
                task,
                number=number,
                completions=done[str(number)],
                rollouts=[
                    rollout_of(prompts[number], completion, sampling)
                    for completion in done[str(number)]
                ],
            )
            for number, task in enumerate(tasks)
        ]


def _scored(
    task: Task, *, number: int, completions: list[Completion], rollouts: list[Rollout]
) -> Group:
    answers = [task.columns["answer"]] * len(completions)
    totals = exact([completion.text for completion in completions], answers)
    group = Group(
        number=number,
        task=task,
        episodes=tuple(Episode(turns=(), rollouts=(rollout,)) for rollout in rollouts),
        scores=tuple(Score(total=total, parts={}) for total in totals),
    )
    advantages = GroupAdvantages()(group).astype(np.float32)
    return dataclasses.replace(group, advantages=advantages)


def _transformed(group: Group, transform: Callable[[Rollout], Rollout]) -> Group:
    episodes = tuple(
        dataclasses.replace(episode, rollouts=tuple(transform(r) for r in episode.rollouts))
        for episode in group.episodes
    )
    return dataclasses.replace(group, episodes=episodes)


def _tasks(rows: list[dict[str, Any]]) -> list[Task]:
    return [Task(prompt=row["prompt"], columns={"answer": row["answer"]}) for row in rows]


def _config(model: Path, settings: LockstepSettings) -> RunConfig:
    return load_config(
        {
            "model": str(model),
            "seed": settings.seed,
            "loss": settings.loss,
            "placement": {"trainer": "cpu", "engines": "cpu"},
            "engine": {"max_sequences": 128},
            "trainer": {"steps": settings.steps, "microbatch_tokens": 2048},
            "optimizer": {
                "learning_rate": settings.learning_rate,
                "schedule": "linear",
                "min_lr_ratio": 0.1,
                "warmup_steps": 5,
            },
        }
    )
