"""Environments of the verifiers package (0.4, its v1 API); see docs/how-to/from-verifiers.md.

The package plays and scores the episodes. Its agents call the model through a gateway, which
records their calls as turns of the episode. Runs on the event loop of the environments.
"""

import asyncio
import importlib
import os
import sys
from statistics import fmean
from typing import Any

from millrace.core.errors import ConfigError, TaskError, printable
from millrace.core.records import Prompt, Task
from millrace.environments.agent import Agent
from millrace.serving.programs.gateway import Gateway, GatewaySession

COLUMN = "verifiers_task"  # task column with the index in the taskset
KEY_VARIABLE = "MILLRACE_GATEWAY_KEY"  # the package reads keys only from the environment


class VerifiersEnvironment:
    def __init__(self, env: Any, *, max_tasks: int | None = None) -> None:
        """`env`: from vf.load_environment(). `max_tasks`: required for an infinite taskset."""
        _verifiers()
        if max_tasks is None and not env.taskset.bounded:
            raise ConfigError(f"Taskset {type(env.taskset).__name__!r} is infinite; set max_tasks.")
        self._env = env
        taskset = env.taskset if max_tasks is None else env.taskset.take(max_tasks)
        self._tasks = {task.data.idx: task for task in taskset}
        self._is_single = len(env.config.agent_harnesses()) == 1
        self._gateway = Gateway()
        self._serving: asyncio.Task[None] | None = None
        self.__name__ = env.config.env_id

    def tasks(self) -> list[Task]:
        """Return the tasks of the taskset, for mr.train(tasks=...)."""
        return [
            Task(prompt=_prompt_of(task.data), columns={COLUMN: index})
            for index, task in self._tasks.items()
        ]

    async def open(self) -> None:
        """Start what the environment shares among its episodes."""
        self._ending = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready))
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._serving

    async def close(self) -> None:
        if self._serving is not None:
            self._ending.set()
            await self._serving
            self._serving = None

    async def __call__(self, task: Task, agent: Agent) -> float | dict[str, float]:
        if self._serving is None:
            await self.open()
        chosen = self._tasks.get(task.columns.get(COLUMN, -1))
        if chosen is None:
            raise TaskError(
                f"A task has {COLUMN} = {task.columns.get(COLUMN)!r}, which is not in the"
                " taskset; use the tasks of VerifiersEnvironment.tasks()."
            )
        async with self._gateway.open(agent) as session:

            def admit(trace: Any) -> None:
                """Route the requests of a trace, which carry its id, to its agent."""
                role = trace.agent
                own = agent if self._is_single else agent.role(role.name, trained=role.trainable)
                self._gateway.admit(trace.id, session, own)

            playing = self._env.run_episode(chosen, await self._context(), on_trace=admit)
            episode = await session.guard(playing)
        if not episode.ok:
            raise self._failed(episode, agent, session)
        if self._is_single:
            return fmean(trace.reward for trace in episode.traces)
        by_agent = episode.by_agent.items()
        return {name: fmean(trace.reward for trace in traces) for name, traces in by_agent}

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Open and close the environment in one asyncio task, as its context managers require."""
        async with self._env.serving():
            ready.set_result(None)
            await self._ending.wait()

    async def _context(self) -> Any:
        """Return the model context of its agents. All episodes share one address, because the
        package caches a client per address."""
        vf = _verifiers()
        base_url, os.environ[KEY_VARIABLE] = await self._gateway.shared()
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        return vf.ModelContext(model="policy", client=client)

    def _failed(self, episode: Any, agent: Agent, session: GatewaySession) -> Exception:
        """Return the error of a failed episode. Without a model call there is nothing to train."""
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)[:400]
        if session.num_calls:
            text = f"An episode of environment {self.__name__!r} failed: {reasons}"
            print(printable(text), file=sys.stderr)
            return agent.end("crash")
        return TaskError(
            f"Environment {self.__name__!r} failed before it called the model: {reasons}"
        )


def _prompt_of(data: Any) -> Prompt:
    """Return the prompt for metrics and samples; the package renders what the model sees."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, {"role": "user", "content": data.prompt_text or "(the environment starts)"}]


def _verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError:
        raise ConfigError(
            "Environments of verifiers need that package, 0.4 or newer, which is not installed;"
            " install millrace[verifiers-envs]."
        ) from None
