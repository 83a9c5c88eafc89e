"""How many frames a request passes from the dispatcher to the wire."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace

from controller_rig import make_dispatcher, make_tracker
from fakes import CharacterTokenizer, FakeScorers, make_completion

from millrace.cluster.messages import Generate, GenerateDone
from millrace.controller.admission import Admission
from millrace.core.records import Sampling, Score
from millrace.core.staleness import StalenessLimit
from millrace.environments.function_environment import SingleTurn
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer
from millrace.inference.pool import EnginePool
from millrace.inference.remote import RemoteEngine

MAX_FRAMES = 9  # a group's task, generation, player, environment, policy, pool (2), engine, worker


class StackWorker:
    """A worker that answers Generate and remembers the call stack."""

    def __init__(self) -> None:
        self.frames: list[str] = []

    async def call(self, message, **settings):
        if isinstance(message, Generate) and not self.frames:
            frame = sys._getframe()
            while frame is not None:
                self.frames.append(frame.f_code.co_qualname)
                if frame.f_code.co_name == "_run_group":
                    break
                frame = frame.f_back
        return GenerateDone(completions={i: make_completion("1") for i in range(message.request.n)})

    def kill(self) -> None:
        """Never called."""


async def test_request_passes_few_frames_from_dispatcher_to_wire():
    worker, limit = StackWorker(), StalenessLimit(max_staleness=0)
    pool = EnginePool([RemoteEngine(worker)])  # pyright: ignore
    player = Player(
        environment=SingleTurn(),
        engine=pool,
        renderer=Renderer(CharacterTokenizer()),
        sampling=Sampling(max_new_tokens=4),
        max_context=64,
        seed=0,
    )
    admission = Admission(groups_per_step=1, limit=limit, max_running=1, version=0)
    admitted = asyncio.Event()

    class Buffer:
        async def admit(self, group):
            admitted.set()

        async def recheck(self):
            pass

    class Scorers(FakeScorers):
        async def score(self, group, scoring):
            return replace(group, scores=(Score(total=1.0, parts={}),) * len(group.episodes))

    dispatcher = make_dispatcher(
        make_tracker(admission),
        player=player,
        buffer=Buffer(),
        scorers=Scorers(),
    )
    running = asyncio.create_task(dispatcher.run())
    await asyncio.wait_for(admitted.wait(), 5)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert worker.frames[-1].endswith("_run_group"), worker.frames
    assert len(worker.frames) <= MAX_FRAMES, worker.frames
