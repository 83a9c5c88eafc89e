"""Plays tasks: an environment talks to the policy, and every token is recorded as it was sampled.

Runs on the controller's event loop.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from millrace.cluster.messages import TurnWanted
from millrace.core.completions import is_complete
from millrace.core.errors import TaskError
from millrace.core.protocols import Engine, OnTokens, SupportsGenerate, SupportsScore
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
from millrace.core.staleness import TokenVersions
from millrace.environments.rollouts.partial_rollouts import Attempt, ReplayingEngine
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.rollouts.turn_barrier import TurnBarrier
from millrace.environments.token_record import rollout_of
from millrace.scoring.scheduling.group_scoring import GroupScoring
from millrace.tasks.streams import LengthPredictor

CHUNK_TOKENS = 32  # per streamed chunk; one message per token would cost as much as sampling it
# Later turns go before all requests that start an episode, or the tokens of the first turn would
# grow stale while the next turn waits in the queue of an engine.
FOLLOW_UP = 1 << 30
EnginesByModel = Mapping[str, SupportsGenerate]


@dataclass(kw_only=True, eq=False)
class GroupPolicy:
    """The model as the environment of one group sees it; used on the controller's event loop."""

    engine: SupportsGenerate
    renderer: Renderer
    sampling: Sampling
    max_context: int
    name: str  # of the group, for messages
    seed: int  # of all draws of the group
    attempt: Attempt
    is_trained: bool = False  # the sampled tokens are for training
    turns: TurnBarrier | None = None  # if turns of all episodes start in rounds
    scoring: GroupScoring | None = None  # receives streamed tokens and finished episodes
    priority: int = 0
    others: EnginesByModel = field(default_factory=dict[str, SupportsGenerate])
    score_engine: SupportsScore | None = None  # computes entropies
    wants_routes: bool = False  # record the expert routes of trained tokens

    def __post_init__(self) -> None:
        self._takes_episodes = self.scoring is not None and self.scoring.takes_episodes
        self._calls = itertools.count()
        self._token_versions: dict[int, list[TokenVersions]] = {}  # of trained tokens, by episode

    async def complete(self, prompt: Prompt, n: int) -> list[Episode]:
        """Sample n episodes of one turn, which share the prompt's prefill, and report each as
        finished: as soon as it has ended if a scorer takes it then."""
        tokens = self.renderer.render(prompt)
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
            priority=self.priority,
            seed=self.seed + call,
            expires=self.is_trained,
            routes_from=0 if self.wants_routes else None,
        )
        episodes: dict[int, Episode] = {}
        start_s = self.attempt.now()

        def finish(member: int, completion: Completion) -> None:
            if member not in episodes:
                turn = Turn(prompt=prompt, completion=completion.text, finish=completion.finish)
                rollout = rollout_of(tokens, completion, self.sampling)
                episodes[member] = Episode(turns=(turn,), rollouts=(rollout,))
                self.finished(member, episodes[member])
                self.attempt.add_turn(member, start_s, completion.versions)

        request, on_tokens = self._streamed(request)
        completions = await self.engine.generate(
            request,
            on_tokens,
            # Completions that were cut may be discarded with their group.
            lambda member, each: finish(member, each) if is_complete(each) else None,
        )
        self.attempt.record(completions)
        for member, completion in enumerate(completions):
            finish(member, completion)
        return [episodes[member] for member in range(n)]

    async def sample(self, wanted: TurnWanted, *, episode: int) -> Completion:
        """Sample one turn of the episode with this index in the group. Draws depend on the index
        and on the number of the call."""
        model, partial, is_trained = wanted.model, wanted.partial, wanted.is_trained
        request = Request(
            id=f"{self.name}/{episode}.{wanted.call}",
            prompt=wanted.prompt,
            sampling=wanted.sampling,
            seed=self.seed + wanted.call,
            index=episode,
            session=f"{self.name}/{wanted.session}",
            pinned=wanted.pinned,
            priority=self.priority if wanted.call == 0 else FOLLOW_UP,
            partial=partial,
            expires=self.is_trained and is_trained,
            adapter=wanted.adapter,
            routes_from=wanted.routes_from if self.wants_routes and is_trained else None,
        )
        start_s = self.attempt.now()
        engine, on_tokens = self.engine if model is None else self.others[model], None
        if model is None or is_trained:
            request, on_tokens = self._streamed(request)
        own = contextlib.nullcontext()
        if self.turns is not None:
            own = self.turns.turn(self.attempt.number, episode, wanted.call)
        async with own:
            (completion,) = await engine.generate(request, on_tokens)
        if is_trained:
            num_known = 0 if partial is None else len(partial.tokens)
            policy = model or wanted.adapter
            versions = completion.versions[num_known:]
            self.attempt.add_turn(episode, start_s, versions)
            sampled = TokenVersions.of(versions, policy=policy)
            self._token_versions.setdefault(episode, []).append(sampled)
            self.attempt.record([completion], num_known=num_known, policy=policy)
        return completion

    def episode(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Enclose the episode with this index in the group."""
        if self.turns is None:
            return contextlib.nullcontext()
        return self.turns.episode(self.attempt.number, index)

    async def entropies(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:  # [L] each
        """Entropies of the current policy at each sampled token, in nats; 0.0 elsewhere."""
        assert self.score_engine is not None, "a policy in training has one"
        entropies = [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]
        # Greedy sampling has no entropy.
        drawn = [i for i, r in enumerate(rollouts) if r.num_sampled and r.sampling.temperature > 0]
        requests = [
            score_request_for(
                r, temperature=r.sampling.temperature, kept=r.kept, wants_entropies=True
            )
            for r in (rollouts[i] for i in drawn)
        ]
        scored = await self.score_engine.score(requests) if requests else []
        for i, logprobs in zip(drawn, scored, strict=True):
            entropies[i][rollouts[i].mask] = logprobs.entropies
        return entropies

    async def token_rewards(self, index: int) -> list[np.ndarray]:  # [L] for each rollout
        """Token rewards of a finished episode; 0.0 where scorers give none. Raises TaskError if no
        scorer gives token rewards, and ScoreError if one fails."""
        if self.scoring is None or not self._takes_episodes:
            raise TaskError(
                f"{self.name}: no scorer rewards single tokens while a group is generated; add a"
                " [[scorers]] of type 'process_reward_model'."
            )
        return await self.scoring.token_rewards(index)

    def gave_up(self, index: int) -> None:
        """Report an episode that will not be part of the group; its tokens are wasted."""
        sampled = self._token_versions.get(index, ())
        self.attempt.given_up = TokenVersions.joined([self.attempt.given_up, *sampled])
        self.attempt.life.turns.pop(index, None)

    def finished(self, index: int, episode: Episode) -> None:
        """Report a finished episode; others of the group may still run."""
        if self.scoring is not None and self._takes_episodes:
            self.scoring.add(index, episode)

    def _streamed(self, request: Request) -> tuple[Request, OnTokens | None]:
        """Return the request, and the scorers' receiver of its tokens, if there is one."""
        on_tokens = None if self.scoring is None else self.scoring.stream_callback(request)
        if on_tokens is None:
            return request, None
        return replace(request, min_chunk_tokens=CHUNK_TOKENS), on_tokens


class Environment(Protocol):
    """Plays n episodes of a task with the given policy."""

    async def play(self, task: Task, policy: GroupPolicy, n: int) -> list[Episode]: ...


@dataclass(kw_only=True, eq=False)
class Player:
    environment: Environment
    engine: Engine
    renderer: Renderer
    sampling: Sampling
    max_context: int
    seed: int
    lengths: LengthPredictor = field(default_factory=lambda: LengthPredictor(max_skips=0))
    others: EnginesByModel = field(default_factory=dict[str, SupportsGenerate])
    wants_routes: bool = False  # in groups for training, which replays the routes
    turns: TurnBarrier | None = None  # of synchronous runs

    def evaluating(self, *, engine: Engine, temperature: float) -> "Player":
        """Return the same player on other engines, at this temperature; 0 = greedy."""
        greedy = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if temperature == 0 else {}
        sampling = replace(self.sampling, temperature=temperature, **greedy)
        return replace(self, engine=engine, sampling=sampling)

    async def play_for_training(
        self, task: Task, *, attempt: Attempt, group_size: int, scoring: GroupScoring | None = None
    ) -> Group:
        """Play a group for training; each attempt has its own seed. `scoring` receives tokens and
        episodes as they are sampled. Raises Expired when the tokens have become too stale."""
        policy = self._policy(
            attempt,
            name="group",
            is_trained=True,
            scoring=scoring,
            priority=self.lengths.priority(task),
            wants_routes=self.wants_routes,
        )
        if (partial := attempt.partial) is not None:
            policy.engine = ReplayingEngine(self.engine, partial=partial)
            policy.others = {
                model: ReplayingEngine(other, partial=partial, model=model)
                for model, other in self.others.items()
            }
        episodes = await self.environment.play(task, policy, group_size)
        group = Group(number=attempt.number, task=task, episodes=tuple(episodes))
        self.lengths.learn(group)
        return group

    async def play_for_evaluation(
        self, task: Task, *, number: int, group_size: int, name: str
    ) -> Group:
        """Play a group of episodes of one task, without a staleness limit."""
        policy = self._policy(Attempt(number), name=name)
        episodes = await self.environment.play(task, policy, group_size)
        return Group(number=number, task=task, episodes=tuple(episodes))

    def _policy(self, attempt: Attempt, *, name: str, **more: Any) -> GroupPolicy:
        number, tries = attempt.number, attempt.tries
        return GroupPolicy(
            engine=self.engine,
            renderer=self.renderer,
            sampling=self.sampling,
            max_context=self.max_context,
            name=f"{name} {number}" + (f", try {tries + 1}" if tries else ""),
            seed=group_seed(self.seed, number, tries=tries),
            attempt=attempt,
            turns=self.turns,
            others=self.others,
            score_engine=self.engine,
            **more,
        )


def group_seed(seed: int, number: int, *, tries: int = 0) -> int:
    """Return a 63-bit seed of its own for each group of a run, and for each further try at it."""
    entropy = [seed & 0xFFFFFFFF, number, *([tries] if tries else [])]
    words = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
