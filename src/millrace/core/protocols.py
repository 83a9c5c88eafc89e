"""Protocols between the parts of a run. run/build.py connects the implementations."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millrace.core.records import (
    Completion,
    CompletionChunk,
    Group,
    Request,
    ScoreRequest,
    ScorerResult,
    Task,
    TokenLogprobs,
    WeightUpdate,
)
from millrace.core.staleness import BufferedGroup

OnTokens = Callable[[CompletionChunk], None]
OnCompletion = Callable[[int, Completion], None]  # index among the n completions, completion
Filter = Callable[[Group], Group | None]
"""Returns a scored group, possibly with fewer tokens in its masks, or None to drop it."""


class Capability(StrEnum):
    """Something an engine backend may offer beyond the Engine protocol, as error messages call it.
    Every capability has a part of the contract suite."""

    KEPT_IDS = "kept ids of truncated sampling"
    ROUTES = "expert routes of each token"
    SEEDS = "seeded sampling"
    REPRODUCIBLE = "bitwise reproducible sampling"
    SCORING = "logprobs and entropies of given tokens"
    PARTIALS = "resuming partial completions"
    TOKEN_VERSIONS = "weight swaps within a completion"
    LORA = "LoRA weight updates"
    ADAPTERS = "named LoRA adapters per request"
    GRAMMARS = "grammar-constrained sampling"
    LOGITS = "penalties, logit biases and top logprobs"
    SLEEP = "giving its GPU memory back"


class SupportsGenerate(Protocol):
    """Generates completions. Called from the controller's event loop."""

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """Return all n completions once the last one has ended.

        Before that, on this event loop, `on_tokens` receives every sampled token once and in order,
        and `on_completion` receives each completion once, as soon as it has ended. An exception
        raised by either callback ends the request and is raised here."""
        ...


class SupportsScore(Protocol):
    """Scores given tokens. Called from the controller's event loop."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Score all requests with one version of the policy: the version served now."""
        ...


class Engine(SupportsGenerate, SupportsScore, Protocol):
    """An inference engine whose weights can be replaced while it generates. Every method raises
    EngineLost if the engine has died or does not answer; another one can resume its requests."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this engine offers beyond the core protocol."""
        ...

    async def swap(self, update: WeightUpdate) -> int:
        """Make `update` visible between two forward passes; returns the version now visible."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests now. Their generate() returns the tokens sampled so far, with finish =
        "abort". Unknown ids are ignored."""

    async def expire(self, before: int, adapters: Mapping[str, int] | None = None) -> None:
        """End every request with `expires` set that holds a token older than version `before`, or
        than that of its adapter in `adapters`, which are policies with versions of their own.
        Its generate() returns the tokens sampled so far, with finish = "expire"."""

    async def pause(self, *, sleep: bool = False) -> None:
        """Stop generating until resume(). Requests, swaps and aborts are still accepted. Returns
        once the forward pass in progress has finished. With `sleep`, the engine also gives back
        the memory of weights and KV, and takes new weights after resume()."""

    async def resume(self) -> None:
        """Undo pause(); no error if the engine is not paused."""


class Scorer(Protocol):
    """Scores the episodes of one group."""

    name: str
    weight: float  # factor for its scores and its token rewards

    async def score(self, group: Group) -> list[ScorerResult]:
        """Return one result per episode, in order. Raises ScoreError."""
        ...


@runtime_checkable
class StreamingScorer(Protocol):
    """A scorer that starts to work while episodes are still being generated. score() is called as
    for any other scorer and reuses what is already computed."""

    def stream_callback(self, request: Request, *, task: Task) -> OnTokens | None:
        """Return the receiver of the tokens of `request`, or None to skip the request."""


@runtime_checkable
class StartableScorer(Protocol):
    """A scorer that holds a process, a connection or a file during the run."""

    async def start(self) -> None:
        """Raises MillraceError if the scorer cannot be used."""

    async def close(self) -> None:
        """Also called after a failed start()."""


@runtime_checkable
class RestartingScorer(Protocol):
    """A scorer that replaces its own process when that process dies."""

    @property
    def num_lost(self) -> int: ...


def gives_scores(scorer: Scorer) -> bool:
    """True if the scorer returns episode scores: not if it has a `token_scores_only` that is True.
    Evaluations skip those."""
    return not getattr(scorer, "token_scores_only", False)


@runtime_checkable
class VersionSubscriber(Protocol):
    """A scorer that receives each new version of the policy, such as a self-teacher."""

    async def swap(self, update: WeightUpdate) -> int:
        """Return the version in use once the bytes of this update may be reused."""
        ...


class Advantages(Protocol):
    """Estimates the advantage of each episode of a scored group. If its `handles_agents` is true,
    it gets all agents of an episode at once."""

    def __call__(self, group: Group) -> Sequence[float] | Sequence[np.ndarray] | np.ndarray:
        """Return a number per episode, or an array [L] per rollout."""
        ...


@runtime_checkable
class AdvantagesOverBatch(Protocol):
    """An estimator that also normalises across all groups of one training step."""

    def over_batch(self, groups: Sequence[Group]) -> Sequence[Any]:
        """Return for each group what __call__ would return."""
        ...


class Selection(Protocol):
    """Selects the episodes to train from a scored group that has more than needed."""

    def __call__(self, group: Group, *, keep: int, rng: np.random.Generator) -> Sequence[int]:
        """Return `keep` different episode indices."""
        ...


class GroupOrder(Protocol):
    """Chooses which waiting groups are trained next. The event loop calls it: it must be quick."""

    def num_needed(self, n: int) -> int:
        """Waiting groups among which a choice of n makes sense. A run that can never have that many
        does not start."""
        ...

    def choose(self, waiting: Sequence[BufferedGroup], n: int, *, version: int) -> Sequence[int]:
        """Return n different indices of `waiting`, which holds at least n groups in the order of
        admission. All of them may be trained at trainer version `version`."""
        ...
