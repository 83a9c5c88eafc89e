"""The tokens that an agent saw and sampled in one episode, as a tree.

Each exchange with the engine extends an earlier one, at its end or, after a fork, anywhere in it. A
path from a root to an exchange that no other extends is a branch, and becomes a Rollout.

Promise: tokens are recorded as the engine received and returned them. Each sampled token is trained
in exactly one rollout: that of the first branch that holds it. In later branches it is context.

G = new prompt tokens of an exchange, N = its sampled tokens, L = tokens of a branch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from millrace.core.completions import unknown_routes
from millrace.core.records import Completion, Kept, Rollout, Sampling


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """New prompt tokens after those of `parent`, and the completion that the engine sampled."""

    parent: "Exchange | None"
    start: int  # tokens of the parent's branch before this exchange
    given: np.ndarray  # [G] int32
    completion: Completion  # [N]; its routes begin at first_routed(start)
    sampling: Sampling

    @property
    def end(self) -> int:
        return self.start + len(self.given) + len(self.completion.tokens)

    def path(self) -> "Path":
        steps: list[tuple[Exchange, int]] = [(self, self.end)]
        while (exchange := steps[-1][0]).parent is not None:
            steps.append((exchange.parent, exchange.start))
        return steps[::-1]

    def tokens(self, end: int | None = None) -> np.ndarray:  # [end] int32
        """Return the tokens of the branch up to `end`; None = up to the end of this exchange."""
        return _tokens(self.path())[: self.end if end is None else end]


# Exchanges from the root on, each with the position at which the next one starts.
Path = Sequence[tuple[Exchange, int]]


class TokenRecord:
    """The exchanges of one agent. Used from one event loop."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def add(
        self,
        given: np.ndarray,
        completion: Completion,
        *,
        sampling: Sampling,
        parent: Exchange | None = None,
        at: int | None = None,
    ) -> Exchange:
        """Add an exchange after the first `at` tokens of the parent's branch; None = after all."""
        start = 0 if parent is None else parent.end if at is None else at
        while parent is not None and start <= parent.start:  # a fork before this exchange
            parent = parent.parent
        assert parent is None or start <= parent.end, "a fork lies within its branch"
        given = np.asarray(given, np.int32)
        exchange = Exchange(
            parent=parent, start=start, given=given, completion=completion, sampling=sampling
        )
        self.exchanges.append(exchange)
        return exchange

    def rollouts(self, places: Mapping[Exchange, int] | None = None) -> tuple[Rollout, ...]:
        """Return the rollouts of all branches, in the order in which the branches ended. A branch
        whose tokens were sampled at several temperatures has one rollout per temperature. `places`
        sets Rollout.places: the place of the first sampled token of each exchange."""
        is_trained = {e: np.zeros(len(e.completion.tokens), bool) for e in self.exchanges}
        extended = {e.parent for e in self.exchanges if e.parent and e.start == e.parent.end}
        paths = [exchange.path() for exchange in self.exchanges if exchange not in extended]
        return tuple(
            rollout if places is None else _with_places(rollout, path, places)
            for path in paths
            for rollout in _branch_rollouts(path, is_trained)
        )


def rollout_of(prompt: np.ndarray, completion: Completion, sampling: Sampling) -> Rollout:
    exchange = TokenRecord().add(prompt, completion, sampling=sampling)
    mask = np.ones(len(completion.tokens), bool)
    return _rollout(exchange.path(), [mask], sampling=sampling)


def places_of(exchanges: Iterable[Exchange]) -> dict[Exchange, int]:
    """Return the number of tokens that an episode sampled before each exchange."""
    exchanges = list(exchanges)
    sizes = (len(exchange.completion.tokens) for exchange in exchanges)
    return dict(zip(exchanges, accumulate(sizes, initial=0), strict=False))


def first_routed(start: int) -> int:
    """Return the position of the first token whose routes an exchange at `start` brings. Earlier
    exchanges have recorded those before it, except of their last token, which no pass has read."""
    return max(0, start - 1)


def _branch_rollouts(path: Path, is_trained: dict[Exchange, np.ndarray]) -> Iterator[Rollout]:
    new: dict[Exchange, np.ndarray] = {}  # [N] bool; trained in this branch
    for exchange, end in path:
        completion = exchange.completion
        position = np.arange(len(completion.tokens))
        is_here = position < _num_sampled(exchange, end)
        # Shared tokens are trained with the parent episode; version -1 follows an edited recording.
        is_trainable = (completion.versions >= 0) & (position >= completion.num_shared)
        new[exchange] = is_here & is_trainable & ~is_trained[exchange]
        is_trained[exchange] |= is_here
    temperatures = {e.sampling.temperature: e.sampling for e in new if new[e].any()}
    for temperature, sampling in temperatures.items():
        masks = [new[e] & (e.sampling.temperature == temperature) for e, _ in path]
        yield _rollout(path, masks, sampling=sampling)


def _with_places(rollout: Rollout, path: Path, places: Mapping[Exchange, int]) -> Rollout:
    own = [places[e] + np.arange(len(e.completion.tokens), dtype=np.int32) for e, _ in path]
    return replace(rollout, places=_joined(path, own, fill=-1)[: len(rollout.tokens)])


def _rollout(path: Path, masks: Sequence[np.ndarray], *, sampling: Sampling) -> Rollout:
    """`masks` [N] select the trained tokens of each exchange."""
    mask = _joined(path, masks, fill=False)
    trained = np.flatnonzero(mask)
    end = int(trained[-1]) + 1 if len(trained) else len(mask)  # later tokens have no gradient
    versions = _joined(path, [e.completion.versions for e, _ in path], fill=-1)
    logprobs = _joined(path, [e.completion.logprobs for e, _ in path], fill=0.0)
    return Rollout(
        tokens=_tokens(path)[:end],
        mask=mask[:end],
        engine_logprobs=np.where(mask, logprobs, 0)[:end].astype(np.float32),
        versions=np.where(mask, versions, -1)[:end].astype(np.int32),
        sampling=sampling,
        kept=_kept(path, masks, num_rows=end),
        routes=_routes(path, num_rows=end),
    )


def _tokens(path: Path) -> np.ndarray:  # [L] int32
    parts = [np.concatenate([e.given, e.completion.tokens])[: end - e.start] for e, end in path]
    return np.concatenate(parts).astype(np.int32, copy=False)


def _joined(path: Path, sampled: Sequence[np.ndarray], *, fill: float) -> np.ndarray:  # [L]
    """Join the values [N] of sampled tokens, with `fill` for prompt tokens."""
    parts: list[np.ndarray] = []
    for (exchange, end), values in zip(path, sampled, strict=True):
        num_given = min(len(exchange.given), end - exchange.start)
        parts += [np.full(num_given, fill, values.dtype), values[: _num_sampled(exchange, end)]]
    return np.concatenate(parts)


def _kept(path: Path, masks: Sequence[np.ndarray], *, num_rows: int) -> Kept | None:
    """Join the kept ids of trained tokens; all other rows are empty."""
    for (exchange, _), mask in zip(path, masks, strict=True):
        has_kept = exchange.completion.kept is not None or not exchange.sampling.truncates
        assert has_kept or not mask.any(), "truncated without kept ids"
    if all(exchange.completion.kept is None for exchange, _ in path):
        return None
    ids: list[np.ndarray] = [np.empty(0, np.int32)]
    by_exchange: list[np.ndarray] = []
    for (exchange, _), mask in zip(path, masks, strict=True):
        kept = exchange.completion.kept
        sizes = np.zeros(len(mask), np.int64) if kept is None else np.diff(kept.offsets)
        if kept is not None:
            ids.append(kept.ids[np.repeat(mask, sizes)])
        by_exchange.append(np.where(mask, sizes, 0))
    sizes = _joined(path, by_exchange, fill=0)[:num_rows]
    return Kept(
        ids=np.concatenate(ids).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def _routes(path: Path, *, num_rows: int) -> np.ndarray | None:  # [num_rows, layers, top_k]
    """Join the expert routes of a branch. Where two exchanges have routes of one token, the later
    ones count: the tokens that follow in this branch were predicted with them."""
    known = [(e, routes) for e, _ in path if (routes := e.completion.routes) is not None]
    if not known:
        return None
    joined = unknown_routes(num_rows, like=known[0][1])
    for exchange, routes in known:
        rows = joined[first_routed(exchange.start) :][: len(routes)]
        rows[:] = routes[: len(rows)]
    return joined


def _num_sampled(exchange: Exchange, end: int) -> int:
    return max(0, end - exchange.start - len(exchange.given))
