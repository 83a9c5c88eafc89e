"""`mr.train`, `mr.train_async` and `mr.Run`: a run from settings to checkpoint.

Promise: errors that can be found without a worker are raised before any worker starts. mr.train
runs in the calling thread, unless an event loop runs there, as in a notebook.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from millrace.config import RunConfig, load_config
from millrace.config.keywords import TrainArguments
from millrace.controller.preemption import Preemption
from millrace.core.errors import ConfigError
from millrace.monitoring.callbacks import Callback, check_callback
from millrace.run.execution.execute import RunResult, execute
from millrace.run.execution.placement_report import cluster_lines, placement_lines, placement_table
from millrace.run.prepare import prepare
from millrace.run.scaling import ask

T = TypeVar("T")
ConfigLike = str | Path | Mapping[str, Any] | RunConfig | None
ScorerLike = Callable[..., Any] | str | Mapping[str, Any]


def train(
    config: ConfigLike = None, *, resume: bool = False, **arguments: Unpack[TrainArguments]
) -> RunResult:
    """Train a model; returns when the last step is done and its checkpoint written.

    Settings come from a TOML file or a dict; keyword arguments (`model="...", trainer={"steps":
    10}`) override them. `tasks`, `eval_tasks`, `scorers` and `environment` may be Python objects.
    Settings of an environment function are given beside it: `environment={"function": play,
    "max_turns": 8}`. `scorers` are added to those of the file: reward functions, names ("exact",
    "rewards.py:digits") or tables ({"type": "numeric", "tolerance": 0.01}). `callbacks` have hooks
    of mr.Callback; one that raises mr.StopTraining ends the run early. `preset` names a design of
    `millrace presets`, whose settings apply where you set none.
    """
    return finish(Run(config, **arguments), resume=resume)


async def train_async(
    config: ConfigLike = None, *, resume: bool = False, **arguments: Unpack[TrainArguments]
) -> RunResult:
    """Run mr.train in a thread of its own, without blocking the calling event loop. Cancellation
    stops the run like Run.stop(), and waits for its end."""
    run = Run(config, **arguments).start(resume=resume)
    try:
        return await run
    except asyncio.CancelledError:
        run.stop()
        await asyncio.wait([asyncio.wrap_future(run._future)])
        raise


def finish(run: "Run", *, resume: bool) -> RunResult:
    """Run in the calling thread or, if an event loop runs there, as in a notebook, in another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return execute(**run._arguments, resume=resume)
    return run.start(resume=resume).result()


def describe_placement(config: RunConfig, *, resume: bool = False, file: Path | None = None) -> str:
    """What a run would start where, and what it needs there, also as JSON in a file; nothing is
    started."""
    prepared = prepare(config, resume=resume)
    if file is not None:
        file.write_text(json.dumps(placement_table(prepared.processes), indent=2) + "\n")
    if config.cluster.is_local:
        lines = [*placement_lines(prepared.processes, prepared.devices)]
    else:
        local = {spec.name for spec in prepared.scorers}
        here = [p for p in prepared.processes if p.name.rpartition("-")[0] in local]
        elsewhere = [process for process in prepared.processes if process not in here]
        lines = [*cluster_lines(prepared.config, elsewhere), "On this host:"]
        lines += placement_lines(here, prepared.devices) if here else ()
    scorers = f"{config.scoring.workers} scorer processes" if prepared.scorers else "no scorer"
    if config.environment.workers:
        scorers += f", {config.environment.workers} environment workers"
    end = f"Beside them on the CPU: the controller, {scorers}. Nothing was started."
    return "\n".join([*prepared.notes, *lines, end])


class Run:
    """A run in a thread of its own, which can be watched, scaled, stopped and resumed.

    Iteration (`for` and `async for`) yields the metrics of each step from then on, and raises the
    error of a run that failed. All methods may be called from any thread.
    """

    def __init__(self, config: ConfigLike = None, **arguments: Unpack[TrainArguments]) -> None:
        """Take the arguments of mr.train and check the settings; start() starts the run."""
        self._arguments = read_arguments(config, **arguments)
        self.run_dir = Path(self._arguments["config"].run_dir)
        self._preemption = Preemption()
        self._feed = MetricFeed()
        self._started: Future[RunResult] | None = None

    @property
    def is_running(self) -> bool:
        return self._started is not None and not self._started.done()

    def start(self, *, resume: bool = False) -> Self:
        """Start the run and return at once. A run that has ended can start again."""
        if self.is_running:
            raise ConfigError(f"The run in {str(self.run_dir)!r} is running; stop it first.")
        preemption, feed = self._preemption, self._feed = Preemption(), MetricFeed()
        callbacks = [*self._arguments["callbacks"], feed]
        arguments = {**self._arguments, "callbacks": callbacks, "preemption": preemption}

        def body() -> RunResult:
            try:
                return execute(**arguments, resume=resume)
            finally:
                feed.upcoming.set_result(None)

        thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-run")
        self._started = thread.submit(body)
        thread.shutdown(wait=False)
        return self

    def resume(self) -> Self:
        """Start again from the newest checkpoint, after stop() or a failure."""
        return self.start(resume=True)

    def stop(self) -> None:
        """Ask the run to end after its current step and a checkpoint, as SIGTERM does. Returns at
        once. A run that has not begun to train ends without a checkpoint, and result() raises
        Preempted."""
        self._preemption.request_from_thread("Run.stop()")

    def result(self, timeout_s: float | None = None) -> RunResult:
        """Wait for the end of the run and return its result, or raise its error if it failed.
        Ctrl-C stops the run first. Raises TimeoutError if the run is not over in time."""
        return self._wait(self._future, timeout_s)

    def __await__(self) -> Generator[Any, None, RunResult]:
        return asyncio.wrap_future(self._future).__await__()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        ended, upcoming = self._future, self._feed.upcoming
        while (item := self._wait(upcoming)) is not None:
            row, upcoming = item
            yield row
        ended.result()

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        ended, upcoming = self._future, self._feed.upcoming
        # A reader that is cancelled must not cancel the future, which others may wait for.
        while (item := await asyncio.shield(asyncio.wrap_future(upcoming))) is not None:
            row, upcoming = item
            yield row
        await asyncio.wrap_future(ended)

    @property
    def engines(self) -> list[str]:
        """Names of the engines. The run must have begun to train."""
        return ask(self.run_dir)

    def scale(self, *, add: int = 0, remove: Sequence[str] = ()) -> list[str]:
        """Start `add` engines, and remove others by name after they finish their sequences. Returns
        the names of all engines once the new ones serve."""
        return ask(self.run_dir, add=add, remove=tuple(remove))

    @property
    def _future(self) -> Future[RunResult]:
        if self._started is None:
            raise ConfigError(f"The run in {str(self.run_dir)!r} has not started; call start().")
        return self._started

    def _wait(self, future: Future[T], timeout_s: float | None = None) -> T:
        try:
            return future.result(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._future.exception()
            raise


class MetricFeed(Callback):
    """The metrics of a run as they come, for any number of threads and event loops. `upcoming` is
    the next row and the future of the one after it, or None at the end."""

    def __init__(self) -> None:
        self.upcoming: Future[Any] = Future()

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        done, self.upcoming = self.upcoming, Future()
        done.set_result((metrics, self.upcoming))


def read_arguments(
    config: ConfigLike,
    *,
    scorers: Sequence[ScorerLike] | ScorerLike | None = None,
    environment: Callable[..., Any] | Mapping[str, Any] | None = None,
    tasks: Sequence[Any] | None = None,
    eval_tasks: Sequence[Any] | None = None,
    callbacks: Sequence[Any] = (),
    preset: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The arguments of execute(): settings, and Python objects beside them."""
    play = environment if callable(environment) else None
    if isinstance(environment, Mapping):
        table = dict(environment)
        play = table.pop("function") if callable(table.get("function")) else None
        settings["environment"] = table
    if scorers is None or callable(scorers) or isinstance(scorers, str | Mapping):
        scorers = [] if scorers is None else [scorers]
    settled = load_config(config, overrides=settings, preset=preset)
    if tables := [scorer for scorer in scorers if not callable(scorer)]:
        settled = load_config(settled, overrides={"scorers": [*settled.scorers, *tables]})
    for callback in callbacks:
        check_callback(callback)
    return {
        "config": settled,
        "tasks": tasks,
        "eval_tasks": eval_tasks,
        "scorers": [scorer for scorer in scorers if callable(scorer)],
        "environment": play,
        "callbacks": callbacks,
    }
