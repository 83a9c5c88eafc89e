"""A controller with everything of its own, and engines, scorers and a trainer that only pretend: to
see what thousands of steps do to the controller itself."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fakes import CharacterTokenizer, ScriptedEngine, make_chunk

from millrace.cluster.messages import (
    Copied,
    Done,
    Release,
    SaveCheckpoint,
    Saved,
    Stepped,
    TrainStep,
)
from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import RunConfig, load_config
from millrace.core.records import Completion, Group, Sampling, ScorerResult, Task, WeightUpdate
from millrace.core.spans import Span
from millrace.environments.function_environment import SingleTurn
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer
from millrace.inference.pool import EnginePool
from millrace.journal import Journal, JournalHistory, Ledger
from millrace.monitoring.monitor import RunMonitor
from millrace.monitoring.run_dir import RunDir
from millrace.run.build import RunParts, build_controller
from millrace.run.resume import Cursor
from millrace.scoring.advantages import build_advantages
from millrace.scoring.functions.workers import ScorerWorkers
from millrace.scoring.pool import ScorerPool
from millrace.scoring.scheduling.scorer_queue import ScorerQueue
from millrace.scoring.scorer_type import CallSettings
from millrace.scoring.shaping import build_shaping
from millrace.tasks.streams import Curriculum, LengthPredictor
from millrace.training.group import StepsInMemory, TrainerGroup
from millrace.weights.broadcaster import VersionBroadcaster


class Engine(ScriptedEngine):
    """Texts of various lengths, and now and then a task that fails."""

    def __init__(self) -> None:
        super().__init__("")
        self.version = 0
        self._rng = np.random.default_rng(0)

    async def generate(self, request, on_tokens=None, on_completion=None) -> list[Completion]:
        done = []
        for member in range(request.n):
            await asyncio.sleep(0)
            length = int(self._rng.integers(1, 9))
            completion = Completion(
                tokens=self._rng.integers(48, 58, length).astype(np.int32),
                logprobs=np.full(length, -0.5, np.float32),
                versions=np.full(length, self.version, np.int32),
                finish="stop",
                text="7" * length,
            )
            done.append(completion)
            if on_tokens is not None:
                on_tokens(make_chunk(completion, member=member))
            if on_completion is not None:
                on_completion(member, completion)
        return done

    async def expire(self, before: int, adapters: object = None) -> None:
        """It is never so far behind."""

    async def swap(self, update: WeightUpdate) -> int:
        self.version = update.version
        return update.version


class LengthScorer:
    """Every eighth group is all alike, so that a filter drops it."""

    name, weight = "length", 1.0

    async def score(self, group: Group) -> list[ScorerResult]:
        scores = [float(len(episode.turns[0].completion)) for episode in group.episodes]
        return [ScorerResult(score=1.0 if group.number % 8 == 0 else score) for score in scores]


class TrainerWorker:
    """A Worker whose process takes no time; tells of each version like the real one."""

    name = "trainer"

    def __init__(self, on_published: Callable[[WeightUpdate], None]) -> None:
        self.dead: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._on_published = on_published

    async def call(self, message, *, on_part=None, **_limits) -> Any:
        await asyncio.sleep(0)
        match message:
            case TrainStep(version=version):
                asyncio.get_running_loop().call_soon(self._on_published, _update(version))
                return Stepped(version=version, metrics={"loss": 0.0, "batch/trained_tokens": 9.0})
            case SaveCheckpoint(run_state=state):
                on_part(Copied())
                return Saved(version=state["step"])
            case Release():
                return Done()
        raise AssertionError(f"{type(message).__name__} was not expected")


class EndlessRun:
    """`on_step` is told of each step."""

    def __init__(self, folder: Path, *, steps: int, on_step: Callable[[int], None]) -> None:
        self.config = _config(folder, steps=steps)
        self._on_step = on_step
        self._run_dir = RunDir(folder / "run")

    async def run(self) -> None:
        config = self.config
        self._run_dir.open(config)
        self.monitor = RunMonitor(config, run_dir=self._run_dir, resume_from=None)
        tasks = Curriculum(
            [Task(prompt=f"{n}+1=") for n in range(20)], seed=0, target=0.5, explore_share=0.2
        )
        journal = Journal(
            self._run_dir.journal,
            history=JournalHistory(ledger=Ledger.begin()),
            task_of=tasks.redrawn,
            settings=config.journal,
        )
        scorers = _scorers(config)
        engines = EnginePool([Engine()])
        trainer = TrainerGroup(
            [TrainerWorker(self._published)],  # pyright: ignore
            past=StepsInMemory(version=0),
        )
        self._broadcaster = VersionBroadcaster(version=0)
        self._trainer = trainer
        parts = RunParts(
            config=config,
            tasks=tasks,
            held_out=[Task(prompt="9+9=")],
            player=_player(config, engines),
            scorers=scorers,
            engines=engines,
            evaluators=None,
            trainer=trainer,
            broadcaster=self._broadcaster,
            monitor=self.monitor,
            run_dir=self._run_dir,
            journal=journal,
            cursor=Cursor(),
        )
        controller = build_controller(parts)
        try:
            await controller.run()
        finally:
            await journal.close()
            await scorers.close()
            self.monitor.close()
            self._run_dir.close()

    def _published(self, update: WeightUpdate) -> None:
        self._on_step(update.version)
        start_s = float(update.version)
        for worker in ("engine-0", "trainer"):
            span = Span(worker=worker, name="step", busy=True, start_s=start_s, end_s=start_s + 1)
            self.monitor.on_progress(worker, spans=[span], counters={"generated_tokens": start_s})
        self._trainer.published(update)
        self._broadcaster.publish(update)


def _config(folder: Path, *, steps: int) -> RunConfig:
    return load_config(
        {
            "model": "none",
            "run_dir": str(folder / "run"),
            "rollout": {"group_size": 3, "longest_first": 4},
            "trainer": {"steps": steps, "groups_per_step": 2},
            "buffer": {"max_staleness": 2, "replay": {"share": 0.5}},
            "checkpoint": {"every_steps": 5},
            "evaluate": {"every_steps": 5},
            "journal": {"max_bytes": 2**20, "partial_every_s": 0.01},
            "monitoring": {"progress": "off"},
        }
    )


def _player(config: RunConfig, engines: EnginePool) -> Player:
    return Player(
        environment=SingleTurn(),
        engine=engines,
        renderer=Renderer(CharacterTokenizer()),
        sampling=Sampling(**config.sampling.model_dump()),
        max_context=512,
        seed=0,
        lengths=LengthPredictor(max_skips=config.rollout.longest_first),
    )


def _scorers(config: RunConfig) -> ScorerPool:
    queue = ScorerQueue(LengthScorer(), calls=CallSettings(), warn=print)
    return ScorerPool(
        [queue],
        advantages=build_advantages({"type": "group"}),
        workers=ScorerWorkers(WorkerPool(None), num_workers=1),  # pyright: ignore
        functions={},
        shaping=build_shaping(
            penalties=[],
            filters=[{"type": "zero_variance"}],
            selection=config.rollout.selection,
            keep=config.rollout.group_size,
            seed=0,
            scorers=["length"],
        ),
    )


def _update(version: int) -> WeightUpdate:
    return WeightUpdate(
        version=version, tensors=(), num_bytes=0, checksum=0, transport="shm", location=""
    )
