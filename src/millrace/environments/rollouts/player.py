"""Plays a task: an environment talks to the policy, every token is recorded as it was sampled.

Runs on the controller's event loop.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from millrace.core.errors import TaskError
from millrace.core.protocols import (
    Engine,
    Environment,
    OnReply,
    OnTokens,
    ScoringSession,
    SupportsGenerate,
    SupportsScore,
)
from millrace.core.records import (
    Completion,
    Episode,
    Group,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Task,
    Turn,
    score_request_for,
)
from millrace.core.staleness import Stamps
from millrace.environments.rollouts.attempt import Attempt
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.rollouts.replaying_engine import ReplayingEngine
from millrace.tasks.lengths import LengthPredictor

CHUNK_TOKENS = 32  # of streamed chunks; one message per token would cost as much as sampling it


class GroupPolicy:
    """The policy within one group."""

    def __init__(
        self,
        *,
        engine: SupportsGenerate,
        renderer: Renderer,
        sampling: Sampling,
        max_context: int,
        name: str,
        seed: int,
        attempt: Attempt | None = None,
        scoring: ScoringSession | None = None,
        priority: int = 0,
        others: Mapping[str, SupportsGenerate] | None = None,
        reader: SupportsScore | None = None,
        wants_routes: bool = False,
    ) -> None:
        """`attempt`: set if tokens are sampled for training. `scoring`: receives streamed tokens
        and finished episodes. `others`: engines of other models, by name. `reader`: computes
        entropies. `wants_routes`: record the expert routes of trained tokens."""
        self._engine = engine
        self._reader = reader
        self._others = others or {}
        self._renderer = renderer
        self.sampling = sampling
        self.max_context = max_context
        self.name = name
        self.seed = seed
        self._attempt = attempt
        self._scoring = scoring
        self._takes_episodes = scoring is not None and scoring.takes_episodes
        self._priority = priority
        self._wants_routes = wants_routes
        self._calls = itertools.count()
        self._versions: dict[int, list[np.ndarray]] = {}  # of what is trained, by episode

    @property
    def is_trained(self) -> bool:
        return self._attempt is not None

    async def complete(self, prompt: Prompt, n: int, *, on_reply: OnReply) -> None:
        tokens = self._renderer.render(prompt)
        if len(tokens) >= self.max_context:
            raise TaskError(
                f"{self.name}: its prompt has {len(tokens)} tokens, but the context holds"
                f" {self.max_context}; shorten the prompt or raise engine.max_context."
            )
        call = next(self._calls)
        request = Request(
            id=f"{self.name}/{call}",
            prompt=tokens,
            sampling=self.sampling,
            n=n,
            priority=self._priority,
            seed=self.seed + call,
            expires=self.is_trained,
            routes_from=0 if self._wants_routes else None,
        )
        told: set[int] = set()

        def tell(member: int, completion: Completion) -> None:
            turn = Turn(prompt=prompt, completion=completion.text, finish=completion.finish)
            rollout = self._renderer.rollout(tokens, completion, sampling=self.sampling)
            told.add(member)
            on_reply(member, turn, rollout)

        def tell_early(member: int, completion: Completion) -> None:
            if completion.finish in ("stop", "length"):  # else it may come to nothing
                tell(member, completion)

        request, on_tokens = self._streamed(request)
        completions = await self._engine.generate(
            request, on_tokens, tell_early if self._takes_episodes else None
        )
        if self._attempt is not None:
            self._attempt.record(completions)
        for member, completion in enumerate(completions):
            if member not in told:
                tell(member, completion)

    async def sample(
        self,
        prompt: np.ndarray,
        *,
        episode: int,
        call: int,
        sampling: Sampling,
        session: str,
        adapter: str | None = None,
        model: str | None = None,
        is_trained: bool = True,
        pinned: bool = False,
        partial: Completion | None = None,
        routes_from: int = 0,
    ) -> Completion:
        assert model is None or not is_trained, "only the policy learns"
        request = Request(
            id=f"{self.name}/{episode}.{call}",
            prompt=prompt,
            sampling=sampling,
            seed=self.seed + call,
            index=episode,
            session=f"{self.name}/{session}",
            pinned=pinned,
            priority=self._priority,
            partial=partial,
            expires=self.is_trained and is_trained,
            adapter=adapter,
            routes_from=routes_from if self._wants_routes and is_trained else None,
        )
        if model is None:
            request, on_tokens = self._streamed(request)
            (completion,) = await self._engine.generate(request, on_tokens)
        else:
            (completion,) = await self._others[model].generate(request)
        if self._attempt is not None and is_trained:
            num_known = 0 if partial is None else len(partial.tokens)
            self._versions.setdefault(episode, []).append(completion.versions[num_known:])
            self._attempt.record([completion], num_known=num_known)
        return completion

    async def entropies(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        assert self._reader is not None, "those who train have one"
        found = [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]
        # Where the likeliest token is taken each time, there is no chance.
        drawn = [i for i, r in enumerate(rollouts) if r.num_sampled and r.sampling.temperature > 0]
        requests = [
            score_request_for(
                r, temperature=r.sampling.temperature, kept=r.kept, wants_entropies=True
            )
            for r in (rollouts[i] for i in drawn)
        ]
        told = await self._reader.score(requests) if requests else []
        for i, logprobs in zip(drawn, told, strict=True):
            found[i][rollouts[i].mask] = logprobs.entropies
        return found

    async def token_rewards(self, index: int) -> list[np.ndarray]:
        if self._scoring is None or not self._takes_episodes:
            raise TaskError(
                f"{self.name}: no scorer rewards single tokens while a group is generated; add a"
                " [[scorers]] of type 'process_reward_model'."
            )
        return await self._scoring.token_rewards(index)

    def gave_up(self, index: int) -> None:
        if self._attempt is not None:
            stamps = [Stamps.of(versions) for versions in self._versions.get(index, ())]
            self._attempt.given_up = Stamps.joined([self._attempt.given_up, *stamps])

    def finished(self, index: int, episode: Episode) -> None:
        if self._scoring is not None and self._takes_episodes:
            self._scoring.add(index, episode)

    def _streamed(self, request: Request) -> tuple[Request, OnTokens | None]:
        """The request, and the scorers' receiver of its tokens, if there is one."""
        on_tokens = None if self._scoring is None else self._scoring.stream_callback(request)
        if on_tokens is None:
            return request, None
        return replace(request, min_chunk_tokens=CHUNK_TOKENS), on_tokens


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
        lengths: LengthPredictor | None = None,
        others: Mapping[str, SupportsGenerate] | None = None,
        wants_routes: bool = False,
    ) -> None:
        """`others`: engines of models besides the policy, by name. `wants_routes`: of groups for
        training, as they are replayed there."""
        self._others = others or {}
        self._lengths = lengths or LengthPredictor(most=0)
        self._wants_routes = wants_routes
        self._environment = environment
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._max_context = max_context
        self._seed = seed

    def evaluating(self, *, engine: Engine, temperature: float) -> "Player":
        """The same player on these engines, at this temperature; 0 = it takes the likeliest token
        each time."""
        greedy = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature == 0 else {}
        return Player(
            environment=self._environment,
            engine=engine,
            renderer=self._renderer,
            sampling=replace(self._sampling, temperature=temperature, **greedy),
            max_context=self._max_context,
            seed=self._seed,
            others=self._others,
        )

    async def try_group(
        self,
        task: Task,
        *,
        attempt: Attempt,
        group_size: int,
        scoring: ScoringSession | None = None,
    ) -> Group:
        """A group for training; each attempt draws with its own seed. `scoring` receives tokens
        while they are sampled and episodes when they finish. Raises Expired when the group's
        tokens have become too stale."""
        number, tries = attempt.number, attempt.tries
        engine, others = self._engine, self._others
        if (partial := attempt.partial) is not None:
            engine = ReplayingEngine(engine, partial=partial)
            others = {
                model: ReplayingEngine(other, partial=partial, model=model)
                for model, other in others.items()
            }
        policy = GroupPolicy(
            engine=engine,
            renderer=self._renderer,
            sampling=self._sampling,
            max_context=self._max_context,
            name=f"group {number}" if tries == 0 else f"group {number}, try {tries + 1}",
            seed=group_seed(self._seed, number, tries=tries),
            attempt=attempt,
            scoring=scoring,
            priority=self._lengths.priority(task),
            others=others,
            reader=self._engine,
            wants_routes=self._wants_routes,
        )
        episodes = await self._environment.play(task, policy, group_size)
        group = Group(number=number, task=task, episodes=tuple(episodes))
        self._lengths.learn(group)
        return group

    async def play(self, task: Task, *, number: int, group_size: int, name: str) -> Group:
        """A group of episodes of one task, without a staleness limit."""
        policy = GroupPolicy(
            engine=self._engine,
            renderer=self._renderer,
            sampling=self._sampling,
            max_context=self._max_context,
            name=f"{name} {number}",
            seed=group_seed(self._seed, number),
            others=self._others,
            reader=self._engine,
        )
        episodes = await self._environment.play(task, policy, group_size)
        return Group(number=number, task=task, episodes=tuple(episodes))


def group_seed(seed: int, number: int, *, tries: int = 0) -> int:
    """A 63-bit seed of its own for each group of a run, and for each further try at it."""
    entropy = [seed & 0xFFFFFFFF, number, *([tries] if tries else [])]
    words = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
