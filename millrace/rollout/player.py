"""Plays a task: an environment talks to the policy, every token is recorded as it was sampled.

Runs on the controller's event loop.
"""

import itertools
from dataclasses import replace

import numpy as np

from millrace.core.errors import TaskError
from millrace.core.protocols import Engine, Environment
from millrace.core.records import Group, Prompt, Request, Rollout, Sampling, Task, Turn
from millrace.rollout.renderer import Renderer


class PolicyAgent:
    """The trainable policy within one group."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        max_context: int,
        name: str,
        seed: int,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._max_context = max_context
        self._name = name
        self._seed = seed
        self._calls = itertools.count()

    async def complete(self, prompt: Prompt, n: int) -> list[tuple[Turn, Rollout]]:
        tokens = self._renderer.render(prompt)
        if len(tokens) >= self._max_context:
            raise TaskError(
                f"{self._name}: its prompt has {len(tokens)} tokens, but the context holds"
                f" {self._max_context}; shorten the prompt or raise engine.max_context."
            )
        call = next(self._calls)
        request = Request(
            id=f"{self._name}/{call}",
            prompt=tokens,
            sampling=self._sampling,
            n=n,
            seed=self._seed + call,
        )
        completions = await self._engine.generate(request)
        return [
            (
                Turn(prompt=prompt, completion=completion.text, finish=completion.finish),
                self._renderer.rollout(tokens, completion, sampling=self._sampling),
            )
            for completion in completions
        ]


class Player:
    def __init__(
        self,
        *,
        environment: Environment,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        max_context: int,
        seed: int,
    ) -> None:
        self._environment = environment
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._max_context = max_context
        self._seed = seed

    def greedy(self) -> "Player":
        """The same player, taking the likeliest token each time: for evaluation."""
        return Player(
            environment=self._environment,
            engine=self._engine,
            renderer=self._renderer,
            sampling=replace(self._sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0),
            max_context=self._max_context,
            seed=self._seed,
        )

    async def play(self, task: Task, *, number: int, group_size: int, name: str = "group") -> Group:
        """A group of episodes of one task."""
        agent = PolicyAgent(
            engine=self._engine,
            renderer=self._renderer,
            sampling=self._sampling,
            max_context=self._max_context,
            name=f"{name} {number}",
            seed=group_seed(self._seed, number),
        )
        episodes = await self._environment.play(task, agent, group_size)
        return Group(number=number, task=task, episodes=tuple(episodes))


def group_seed(seed: int, number: int) -> int:
    """A 63-bit seed of its own for each group of a run."""
    words = np.random.SeedSequence([seed & 0xFFFFFFFF, number]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
