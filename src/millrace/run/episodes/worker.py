"""The environment worker: `python -m millrace.run.episodes.worker` plays episodes.

The main thread receives messages. Episodes run on an event loop in a second thread, which reports
progress as long as no environment blocks it. Output of the environment goes to the log of this
process.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec

from millrace.cluster import messages
from millrace.cluster.link import Link, WorkerCall, run_module, unexpected
from millrace.cluster.wire import expect_array
from millrace.config import RunConfig, load_config
from millrace.core import errors
from millrace.core.errors import MillraceError, TaskError
from millrace.core.records import Completion
from millrace.core.spans import Timeline
from millrace.environments.function_environment import EpisodePlan, LoadedEnvironment, lifetime
from millrace.environments.replay import schema
from millrace.environments.replay.schema import EpisodeOver
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.threads import LoopThread
from millrace.models.directory import load_tokenizer
from millrace.run.environment import build_environment, load_models, with_servers
from millrace.scoring.functions.user_function import load_function

PROGRESS_S = 0.25
IDLE = "no work"


class EnvironmentWorker:
    """serve() runs in the main thread, methods with an underscore on the loop of the episodes."""

    def __init__(self, message: messages.StartEnvironment, link: Link, timeline: Timeline) -> None:
        self._loaded = load_environment(load_config(message.config), message.function)
        self._link = link
        self._timeline = timeline
        self._num_played = 0
        self._episodes: dict[int, asyncio.Task[None]] = {}  # by key
        self._turns: dict[tuple[int, int], asyncio.Future[Completion]] = {}  # by key and call
        with contextlib.ExitStack() as stack:
            self._thread = stack.enter_context(LoopThread("environments"))
            runner = stack.enter_context(asyncio.Runner())
            living = lifetime(self._loaded.function, thread=self._thread)
            runner.run(living.__aenter__())
            stack.callback(lambda: runner.run(living.__aexit__(None, None, None)))
            self._closing = stack.pop_all()
        timeline.enter(IDLE, busy=False)
        self._thread.start_soon(self._report)

    def serve(self) -> None:
        while True:
            call = self._link.receive()
            assert call is not None
            match call.message:
                case messages.PlayEpisode() as message:
                    self._thread.start_soon(self._begin, call, message)
                case messages.TurnSampled() as message:
                    self._thread.start_soon(self._answer, message)
                case messages.CancelEpisode(key=key):
                    self._thread.start_soon(self._cancel, key)
                case messages.Stop():  # episodes that still run get no reply
                    self._closing.close()
                    call.reply()
                    return
                case _:
                    call.fail(unexpected(call))

    def _report(self) -> None:
        counters = {"episodes": float(self._num_played)}
        self._link.emit(messages.WorkerProgress(spans=self._timeline.drain(), counters=counters))
        asyncio.get_running_loop().call_later(PROGRESS_S, self._report)

    def _begin(self, call: WorkerCall, message: messages.PlayEpisode) -> None:
        self._timeline.enter("episodes", busy=True)
        self._episodes[message.key] = asyncio.create_task(self._play(call, message))

    def _cancel(self, key: int) -> None:
        if (task := self._episodes.pop(key, None)) is not None:
            task.cancel()

    def _answer(self, sampled: messages.TurnSampled) -> None:
        turn = self._turns.get((sampled.key, sampled.call))
        if turn is None or turn.done():
            return
        if sampled.completion is None:
            turn.set_exception(TaskError(sampled.error))
        else:
            turn.set_result(sampled.completion)

    async def _play(self, call: WorkerCall, message: messages.PlayEpisode) -> None:
        def sample(wanted: messages.TurnWanted, **_: int) -> Coroutine[Any, Any, Completion]:
            return self._sample(call, message.key, wanted)  # the controller knows the episode

        plan = msgspec.convert(message.plan, EpisodePlan, dec_hook=expect_array)
        name = plan.settings.name
        try:
            episode, recording = await self._loaded.play(plan, sample)
        except BaseException as error:  # noqa: BLE001 - SystemExit must not end the loop
            if message.key in self._episodes:  # or the controller has cancelled it
                call.fail(_explain(error, name=name))
            return
        finally:
            self._num_played += 1
            self._episodes.pop(message.key, None)
            if not self._episodes:
                self._timeline.enter(IDLE, busy=False)
        try:
            encoded = None if recording is None else schema.encode(recording)
            call.reply(messages.EpisodePlayed(episode=episode, recording=encoded))
        except Exception as error:  # noqa: BLE001 - users' values, such as a repr that fails
            call.fail(TaskError(f"{name}: its episode cannot be sent to the controller: {error}"))

    async def _sample(
        self, link_call: WorkerCall, key: int, wanted: messages.TurnWanted
    ) -> Completion:
        if key not in self._episodes:
            raise EpisodeOver("done")  # the environment still runs after its end
        turn = self._turns[key, wanted.call] = asyncio.get_running_loop().create_future()
        link_call.send_part(wanted)
        try:
            return await turn
        except asyncio.CancelledError:
            if key in self._episodes:
                link_call.send_part(messages.TurnDropped(call=wanted.call))
            raise
        finally:
            del self._turns[key, wanted.call]


def load_environment(config: RunConfig, location: str | None) -> LoadedEnvironment:
    """Load the environment of a run in another process than the controller's."""
    settings, model = config.environment, config.model
    limit = max(1, settings.max_programs // max(1, settings.num_workers))
    given = None if location is None else load_function(location)
    function = build_environment(config.updated(environment={"max_programs": limit}), given)
    assert function is not None, "checked with the config"
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return LoadedEnvironment(
        function=with_servers(config, function),
        renderer=Renderer(tokenizer, template_settings=settings.template),
        others=load_models(config, has_roles=True),
        records=config.monitoring.record_episodes > 0,
    )


def _explain(error: BaseException, *, name: str) -> MillraceError:
    if isinstance(error, MillraceError) and hasattr(errors, type(error).__name__):
        return error  # the controller raises it again
    failure = TaskError(f"{name}: the environment raised {error!r:.200}; fix the environment.")
    failure.__cause__ = error
    return failure


if __name__ == "__main__":
    run_module(messages.StartEnvironment, EnvironmentWorker)
