"""What an agent saw and sampled in one episode: a tree of tokens.

Each exchange with the engine hangs on an earlier one, at its end or, after a fork, anywhere in it.
A path from a root to an exchange that nothing continues is a branch, and becomes a Rollout.

Promise: tokens are recorded as the engine gave and took them, and never made again from text. Each
sampled token is trained in exactly one rollout: in the first branch that holds it. In later ones it
is context, as tokens that were given are; packing lays the common beginning once.

G = tokens given in an exchange, N = sampled in it, L = tokens of a branch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.core.completions import unknown_routes
from millrace.core.records import Completion, Kept, Rollout, Sampling


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Tokens given after those of `parent`, and what the engine sampled behind them."""

    parent: "Exchange | None"
    start: int  # tokens before it: those of the parent, up to here
    given: np.ndarray  # [G] int32
    completion: Completion  # [N]; its routes begin at first_routed(start)
    sampling: Sampling

    @property
    def end(self) -> int:
        return self.start + len(self.given) + len(self.completion.tokens)

    def path(self) -> list[tuple["Exchange", int]]:
        """From the root to this one, each with the end of what the next one goes on from."""
        steps: list[tuple[Exchange, int]] = []
        exchange, end = self, self.end
        while True:
            steps.append((exchange, end))
            if exchange.parent is None:
                return steps[::-1]
            exchange, end = exchange.parent, exchange.start

    def tokens(self, end: int | None = None) -> np.ndarray:  # [end] int32
        """All tokens of the branch up to `end`, by default that of this exchange."""
        parts = [_own(exchange)[: stop - exchange.start] for exchange, stop in self.path()]
        return np.concatenate(parts)[: self.end if end is None else end]


class TokenRecord:
    """Grows while an episode is played. Belongs to one agent, called from one event loop."""

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
        """`given` [G] follows the first `at` tokens of the parent's branch, by default all."""
        assert completion.kept is not None or not sampling.truncates, "truncated without kept ids"
        start = 0 if parent is None else parent.end if at is None else at
        while parent is not None and start <= parent.start:  # a fork before this exchange
            parent = parent.parent
        assert parent is None or start <= parent.end, "a fork lies within its branch"
        exchange = Exchange(
            parent=parent,
            start=start,
            given=np.asarray(given, np.int32),
            completion=completion,
            sampling=sampling,
        )
        self.exchanges.append(exchange)
        return exchange

    def rollouts(self, places: Mapping[Exchange, int] | None = None) -> tuple[Rollout, ...]:
        """One for each branch, in the order in which they ended; where its tokens were sampled at
        several temperatures, one for each of these. `places`: of the first sampled token of each
        exchange, if rollouts are to have them."""
        is_trained: dict[Exchange, np.ndarray] = {
            exchange: np.zeros(len(exchange.completion.tokens), bool) for exchange in self.exchanges
        }
        return tuple(
            _placed(rollout, path, places)
            for path in (tip.path() for tip in self._tips())
            for rollout in _rollouts(path, is_trained)
        )

    def _tips(self) -> list[Exchange]:
        continued = {e.parent for e in self.exchanges if e.parent and e.start == e.parent.end}
        return [exchange for exchange in self.exchanges if exchange not in continued]


def _own(exchange: Exchange) -> np.ndarray:  # [G + N] int32
    return np.concatenate([exchange.given, exchange.completion.tokens]).astype(np.int32)


def _rollouts(
    path: Sequence[tuple[Exchange, int]], is_trained: dict[Exchange, np.ndarray]
) -> Iterator[Rollout]:
    """Those of a branch; marks in `is_trained` what they train."""
    fresh: dict[Exchange, np.ndarray] = {}  # [N] bool
    for exchange, end in path:
        is_here = np.arange(len(exchange.completion.tokens)) < _num_sampled(exchange, end)
        fresh[exchange] = is_here & _is_own(exchange.completion) & ~is_trained[exchange]
        is_trained[exchange] |= is_here
    temperatures = {e.sampling.temperature: e.sampling for e in fresh if fresh[e].any()}
    for temperature, sampling in temperatures.items():
        masks = [
            fresh[e] & (e.sampling.temperature == temperature)  # [N]
            for e, _ in path
        ]
        yield _rollout(path, masks, sampling=sampling)


def _is_own(completion: Completion) -> np.ndarray:  # [N] bool
    """What this episode is the one to train; behind the edit of a replay that is nothing."""
    is_shared = np.arange(len(completion.tokens)) < completion.num_shared
    return (completion.versions >= 0) & ~is_shared


def _placed(
    rollout: Rollout, path: Sequence[tuple[Exchange, int]], places: Mapping[Exchange, int] | None
) -> Rollout:
    if places is None:
        return rollout
    own = [places[e] + np.arange(len(e.completion.tokens), dtype=np.int32) for e, _ in path]
    return replace(rollout, places=_joined(path, own, fill=-1)[: len(rollout.tokens)])


def _rollout(
    path: Sequence[tuple[Exchange, int]], masks: Sequence[np.ndarray], *, sampling: Sampling
) -> Rollout:
    """`masks` [N] of each exchange: its sampled tokens that are trained here."""
    mask = _joined(path, masks, fill=False)
    last = int(np.flatnonzero(mask)[-1]) + 1  # nothing behind it says anything about the policy
    versions = _joined(path, [e.completion.versions for e, _ in path], fill=-1)
    logprobs = _joined(path, [e.completion.logprobs for e, _ in path], fill=0.0)
    return Rollout(
        tokens=np.concatenate([_own(e)[: end - e.start] for e, end in path])[:last],
        mask=mask[:last],
        engine_logprobs=np.where(mask, logprobs, 0)[:last].astype(np.float32),
        versions=np.where(mask, versions, -1)[:last].astype(np.int32),
        sampling=sampling,
        kept=_kept(path, masks, num_rows=last),
        routes=_routes(path, num_rows=last),
    )


def _joined(
    path: Sequence[tuple[Exchange, int]], sampled: Sequence[np.ndarray], *, fill: float
) -> np.ndarray:  # [L]
    """Values [N] of the sampled tokens of each exchange, and `fill` for the given ones."""
    parts: list[np.ndarray] = []
    for (exchange, end), values in zip(path, sampled, strict=True):
        used = min(len(exchange.given), end - exchange.start)
        parts += [np.full(used, fill, values.dtype), values[: _num_sampled(exchange, end)]]
    return np.concatenate(parts)


def _kept(
    path: Sequence[tuple[Exchange, int]], masks: Sequence[np.ndarray], *, num_rows: int
) -> Kept | None:
    """Rows of the trained tokens; all others are empty."""
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


def first_routed(start: int) -> int:
    """Position of the first token whose routes an exchange brings that begins at `start`: of the
    tokens before it they are on record, but for the last one, which this exchange goes on from."""
    return max(0, start - 1)


def _routes(
    path: Sequence[tuple[Exchange, int]], *, num_rows: int
) -> np.ndarray | None:  # [num_rows, layers, top_k]
    """Of all tokens of a branch; where two exchanges have seen one, those of the later: what
    follows in this branch was predicted there."""
    known = [(e, routes) for e, _ in path if (routes := e.completion.routes) is not None]
    if not known:
        return None
    joined = unknown_routes(num_rows, like=known[0][1])
    for exchange, routes in known:
        rows = joined[first_routed(exchange.start) :][: len(routes)]
        rows[:] = routes[: len(rows)]
    return joined


def _num_sampled(exchange: Exchange, end: int) -> int:
    """Of its sampled tokens, those before `end`."""
    return max(0, end - exchange.start - len(exchange.given))
