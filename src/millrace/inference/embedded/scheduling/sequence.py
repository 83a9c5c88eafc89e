"""One completion in the making, while it waits for a lane and while it has one.

P = prompt tokens, N = sampled tokens so far.

What the scheduler decided: one forward pass, or one round of them.
"""

from dataclasses import dataclass, field

import numpy as np

from millrace.core.records import Completion, Finish, KVOrigin, Request
from millrace.inference.embedded.kv.lineage import Lineage
from millrace.inference.embedded.routes import SequenceRoutes
from millrace.inference.embedded.sampling.kept_ids import KeptIds
from millrace.models.grammars import GrammarMatcher


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """Mutable; belongs to the scheduler. While it has a lane, the lane's arrays are ahead of it."""

    request: Request
    member: int  # 0..n-1 within its request
    arrival: int  # order of arrival in the engine; unique
    adapter_slot: int = 0  # of the request's adapter in the engine's bank, if it has one
    tokens: np.ndarray  # [P + N] int32
    logprobs: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int32
    kept: KeptIds  # N rows, if the request truncates
    routes: SequenceRoutes | None = None  # if they are noted and wanted
    lane: int | None = None
    # Members of the same request that wait for this one's prefill, to share it.
    followers: list["Sequence"] = field(default_factory=list)
    # Without a lane: blocks that hold the KV of all tokens but perhaps the last, which runs once
    # more, because its logits are needed.
    held_blocks: np.ndarray | None = None
    # Of the KV it has, or had when it gave up its lane; in one, up to the last Scheduler.settle().
    lineage: Lineage = ()
    guide: GrammarMatcher | None = None  # by the grammar of its request
    finish: Finish | None = None  # once it has ended

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def has_begun(self) -> bool:
        """True if it has sampled tokens, as far as it knows without its lane."""
        return len(self.tokens) > self.num_prompt

    def completion(self, *, finish: Finish, text: str, block_tokens: int) -> Completion:
        """What it has so far, as a record."""
        spans = tuple((span.start, span.origin.version) for span in self.lineage)
        return Completion(
            tokens=self.tokens[self.num_prompt :],
            logprobs=self.logprobs,
            versions=self.versions,
            kept=self.kept.since(0) if self.request.sampling.truncates else None,
            routes=None if self.routes is None else self.routes.rows(),
            finish=finish,
            text=text,
            kv=KVOrigin(spans=spans, block_tokens=block_tokens) if spans else None,
        )


def sequences_of(
    request: Request,
    *,
    first_arrival: int,
    adapter_slot: int = 0,
    guide: GrammarMatcher | None = None,
    records_routes: bool = False,
) -> list[Sequence]:
    """The n sequences of a request, each where its completion begins or goes on."""
    prompt = np.asarray(request.prompt, dtype=np.int32)
    done = request.partial
    if done is None:
        done = Completion(
            tokens=np.empty(0, dtype=np.int32),
            logprobs=np.empty(0, dtype=np.float32),
            versions=np.empty(0, dtype=np.int32),
            finish="abort",
            text="",
        )
    return [
        Sequence(
            request=request,
            member=member,
            arrival=first_arrival + member,
            adapter_slot=adapter_slot,
            tokens=np.concatenate([prompt, done.tokens.astype(np.int32)]),
            logprobs=done.logprobs,
            versions=done.versions,
            kept=KeptIds(done.kept),
            routes=_routes_of(request) if records_routes else None,
            guide=None if guide is None else guide.copy(),
        )
        for member in range(request.n)
    ]


def _routes_of(request: Request) -> SequenceRoutes | None:
    """With what a partial completion brings, but for its last token: that has not been fed, or is
    fed again for the next one."""
    start, partial = request.routes_from, request.partial
    if start is None or partial is None or partial.routes is None:
        return None if start is None else SequenceRoutes(start)
    num_fed = len(request.prompt) + len(partial.tokens) - 1 - start
    return SequenceRoutes(start, done=partial.routes[:num_fed])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPlan:
    """One forward pass. Each lane computes `counts` tokens, starting behind its cached ones."""

    lanes: np.ndarray  # [R] int64; first those with one token, shortest context first
    counts: np.ndarray  # [R] int64
    num_single: int  # lanes with one token
    copy_sources: np.ndarray  # [C] int64; blocks to copy before the pass ...
    copy_targets: np.ndarray  # [C] int64; ... into these


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundPlan:
    """Several steps of one token for each lane; blocks for all of them are there."""

    lanes: np.ndarray  # [R] int64
    num_steps: int
    copy_sources: np.ndarray  # as in a Plan
    copy_targets: np.ndarray
