"""The records that flow through a run: Task, Request, Completion, Rollout, Episode, Group.

All are frozen. Arrays are numpy, one entry per token; shapes and units stand beside the fields.
L = tokens of a sequence, N = sampled tokens of a completion, P = prompt tokens, n = positions to
score, K = top tokens reported per position.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from millrace.core.spans import GroupLife

DEFAULT_POLICY = "policy"  # name of the model in training, where there is one
Message = dict[str, Any]  # {"role": ..., "content": ...}, as in chat templates
Prompt = str | list[Message]
FinishReason = Literal["stop", "length", "abort", "interrupt", "expire"]
"""How a completion ended: by itself ("stop", "length"), aborted by its caller ("abort"), to be
resumed elsewhere ("interrupt"), or beyond the staleness limit ("expire")."""
Ending = Literal["done", "length", "turns", "timeout", "crash"]
"""How an episode ended: finished by its environment, out of context, turns or time, or crashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem with its reference data."""

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict[str, Any])  # for reward functions
    source: str = ""  # name of the [tasks.source.NAME] it comes from, where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn: temperature, then top-k, top-p and min-p, each on the remaining ids."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    stop: tuple[str, ...] = ()  # strings; the eos token always stops
    grammar: str | None = None  # completions follow it; see models/grammars.py
    # Subtracted from the logit of each id that the completion has: once, and for each occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, number that is added to its logit)
    top_logprobs: int = 0  # likeliest ids that are reported with each token

    @property
    def truncates(self) -> bool:
        """True if tokens need their kept ids. A grammar alone may keep most of the vocabulary, so
        tokens sampled with a grammar and without truncation cannot be trained."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """True if tokens are not samples of the model itself, so they cannot be trained."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """Token ids that truncation kept at each position, as CSR: row i is
    ids[offsets[i]:offsets[i+1]]; an empty row means that all ids were kept. A row of very many may
    be minus their number and a bit mask, the lowest bit first: see completions.kept_row()."""

    ids: np.ndarray  # [sum of row sizes] int32
    offsets: np.ndarray  # [rows + 1] int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopTokens:
    """The likeliest ids at each position of a completion, after temperature and truncation."""

    ids: np.ndarray  # [N, K] int32; the likeliest first
    logprobs: np.ndarray  # [N, K] float32; -inf for ids that could not be sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class KVOrigin:
    """Which weights computed the KV that a completion was sampled with."""

    spans: tuple[tuple[int, int], ...]  # (first token, Version), ascending; the first begins at 0
    block_tokens: int  # engines share KV between sequences in blocks of this size

    def num_other(self, other: "KVOrigin", *, num_tokens: int) -> int:
        """How many of the first `num_tokens` have KV of different versions in the two."""
        return int((self.versions(num_tokens) != other.versions(num_tokens)).sum())

    def versions(self, num_tokens: int) -> np.ndarray:  # [num_tokens] int64
        starts, versions = zip(*self.spans, strict=True)
        ends = np.clip([*starts[1:], num_tokens], 0, num_tokens)
        return np.repeat(versions, ends - np.clip(starts, 0, num_tokens))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """Tokens that an engine sampled after a prompt, possibly with several versions."""

    tokens: np.ndarray  # [N] int32
    logprobs: np.ndarray  # [N] float32; after temperature and truncation
    versions: np.ndarray  # [N] int32; Version that sampled each token
    kept: Kept | None = None  # rows = N; present when sampling truncates
    top: TopTokens | None = None  # rows = N; present with sampling.top_logprobs
    # [F, layers, top_k] uint8 or uint16: experts of the tokens of prompt and completion that were
    # fed to the model, from request.routes_from on; the last token is not fed. An interrupted
    # completion may have fewer: the engine that resumes it records the rest.
    routes: np.ndarray | None = None
    finish: FinishReason
    text: str  # decoded tokens, without the eos token and without the matched stop string
    kv: KVOrigin | None = None  # of prompt and completion; None = its engine does not report it
    num_shared: int = 0  # first tokens that another episode has, too, and trains


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompletionChunk:
    """The M tokens that one completion of a request sampled since its last chunk. All chunks
    together are the tokens of the completion, without those of its partial."""

    member: int  # which of the n completions
    tokens: np.ndarray  # [M] int32
    logprobs: np.ndarray  # [M] float32
    versions: np.ndarray  # [M] int32
    kept: Kept | None = None  # rows = M; present when sampling truncates
    top: TopTokens | None = None  # rows = M; present with sampling.top_logprobs
    finish: FinishReason | None = None  # in the last chunk of a completion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """n completions of one prompt; they share the prompt's prefill.

    The draw of token i depends only on (seed, completion index, i), so a completion does not depend
    on its batch, and an aborted one resumes on any engine with the same tokens.
    """

    id: str
    prompt: np.ndarray  # [P] int32
    sampling: Sampling
    n: int = 1
    seed: int = 0
    partial: Completion | None = None  # with n = 1: continue after these tokens
    index: int = 0  # completion index of the first of the n
    # Turns of one conversation share a session: they go to the engine that has their KV, and with
    # kv = "keep" they reuse it even if the weights have changed since.
    session: str | None = None
    pinned: bool = False  # stays with the engine of its session, whatever the load
    expires: bool = False  # for training, so it ends once its tokens are too stale
    priority: int = 0  # number of queued requests that it may skip
    flow: int = 0  # requests of different flows share an engine's time fairly
    min_chunk_tokens: int = 1  # if it streams: of a chunk, unless the completion ends
    coalesce: bool = False  # if it streams: few chunks are enough, and none just before the end
    # None = the policy; else one of engine.adapters, or "base" = without the adapter in training.
    adapter: str | None = None
    cache_salt: str = ""  # only requests with the same salt share cached KV of their prompts
    # Position of the first token to record routes for, if the model has any; None = no routes.
    routes_from: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherLogprobs:
    """A teacher's logprobs for the tokens of one rollout."""

    logprobs: np.ndarray  # [L] float32; 0.0 where the rollout's mask is False
    top_ids: np.ndarray | None = None  # [L, K] int32; the teacher's top-k tokens
    top_logprobs: np.ndarray | None = None  # [L, K] float32
    version: int | None = None  # policy version of a self-teacher; None for a fixed teacher


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """Immutable token record of one branch of an episode: exactly what was seen and sampled."""

    tokens: np.ndarray  # [L] int32
    mask: np.ndarray  # [L] bool; True = sampled by the policy and trained
    engine_logprobs: np.ndarray  # [L] float32; 0.0 where mask is False
    versions: np.ndarray  # [L] int32; Version that sampled each token, -1 elsewhere
    sampling: Sampling
    kept: Kept | None = None  # rows = L; empty rows where mask is False
    # [L, layers, top_k] uint8 or uint16: experts of each token in the pass that predicted the next
    # one; present for a mixture of experts whose routes are replayed.
    routes: np.ndarray | None = None
    rewards: np.ndarray | None = None  # [L] float32; of single tokens, besides the episode's score
    reference_logprobs: np.ndarray | None = None  # [L] float32; of the reference model
    teacher: TeacherLogprobs | None = None
    agent: str = ""  # that sampled it, if the episode has several agents
    # [L] int32, in a tree: tokens that the episode sampled before each sampled one, -1 elsewhere.
    places: np.ndarray | None = None
    policy: str = DEFAULT_POLICY  # that `versions` belong to

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def num_generated(self) -> int:
        """Includes tokens that a filter has masked."""
        return int((self.versions >= 0).sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One prompt to completion exchange."""

    prompt: Prompt
    completion: str
    finish: FinishReason
    agent: str = ""  # if the episode has several agents


@dataclass(frozen=True, kw_only=True, slots=True)
class Branching:
    """The position of an episode in the tree of its group."""

    number: int  # of the episode within the group
    parent: int | None = None  # number of the episode that it branched off
    place: int = 0  # sampled tokens of the parent before the branch; see Rollout.places


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """One finished run of an environment on a Task."""

    turns: tuple[Turn, ...]
    rollouts: tuple[Rollout, ...]
    # From its environment, for all agents or for each of them; a part of its score.
    reward: float | dict[str, float] | None = None
    ending: Ending = "done"
    counts: dict[str, int] = field(default_factory=dict[str, int])  # what happened, by name
    branching: Branching | None = None
    recording: bytes | None = field(default=None, repr=False)  # JSON, environments/replay/schema.py

    @property
    def was_cut(self) -> bool:
        """True if a limit ended it."""
        is_last_cut = bool(self.turns) and self.turns[-1].finish == "length"
        return self.ending not in ("done", "crash") or is_last_cut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """One scorer's output for the tokens of a rollout, for the Rollout fields of the same name."""

    rewards: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    teacher: TeacherLogprobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScorerResult:
    """One scorer's output for one episode."""

    score: float | None = None  # None = not applicable
    token_scores: tuple[TokenScores, ...] = ()  # one per rollout, or empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The combined score of one episode: the weighted total and its parts."""

    total: float
    parts: dict[str, float | None]  # by scorer name; None = not applicable
    unpenalized: float | None = None  # total before length penalties; None = there are none
    # Totals per agent if agents are rewarded separately; `total` is their mean.
    by_agent: dict[str, float] = field(default_factory=dict[str, float])

    def of_agent(self, name: str) -> float:
        return self.by_agent.get(name, self.total)

    def is_solved(self, solved_at: float) -> bool:
        """Compare the total before length penalties: a correct long answer is still correct."""
        return (self.total if self.unpenalized is None else self.unpenalized) >= solved_at


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The episodes of one Task, with scores and advantages once they are known."""

    number: int  # position of its task in the run's task stream; unique in a run
    task: Task
    episodes: tuple[Episode, ...]
    scores: tuple[Score, ...] = ()  # one per episode, once scored
    advantages: np.ndarray | None = None  # [episodes] float32, once scored
    token_advantages: tuple[np.ndarray, ...] | None = None
    """[L] float32 for each of `rollouts`, if tokens of an episode differ. Training uses these, and
    `advantages` are their means."""
    life: GroupLife | None = None  # once it is ready for the buffer

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for episode in self.episodes for rollout in episode.rollouts)

    @property
    def num_sampled(self) -> int:
        return sum(rollout.num_sampled for rollout in self.rollouts)

    def solve_rate(self, solved_at: float) -> float:
        return sum(score.is_solved(solved_at) for score in self.scores) / len(self.scores)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRequest:
    """Tokens, and the positions whose logprobs are wanted, each given all tokens before it."""

    tokens: np.ndarray  # [L] int32
    positions: np.ndarray  # [n] int32, ascending, n > 0; position 0 cannot be scored
    temperature: float = 1.0
    top_k: int = 0  # K
    wants_entropies: bool = False
    kept: Kept | None = None  # rows = n; ids that the distribution is restricted to

    @property
    def inputs(self) -> np.ndarray:
        """[rows] int32; the tokens that have to be computed: those before the last position."""
        return self.tokens[: int(self.positions[-1])]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLogprobs:
    """Scores of one request, all from one version of a model."""

    logprobs: np.ndarray  # [n] float32; of the tokens at the requested positions
    top_ids: np.ndarray  # [n, K] int32; most likely first
    top_logprobs: np.ndarray  # [n, K] float32
    version: int | None  # None = the model never changes
    entropies: np.ndarray | None = None  # [n] float32, in nats; of each position's distribution


def score_request_for(
    rollout: Rollout,
    *,
    temperature: float,
    top_k: int = 0,
    wants_entropies: bool = False,
    kept: Kept | None = None,
    prompt_override: np.ndarray | None = None,
) -> ScoreRequest:
    """Score all sampled tokens of a rollout, after its own prompt or after `prompt_override`."""
    sampled = np.flatnonzero(rollout.mask)
    tokens, shift = rollout.tokens, 0
    if prompt_override is not None:
        num_prompt = int(sampled[0])
        tokens = np.concatenate([prompt_override, tokens[num_prompt:]])
        shift = len(prompt_override) - num_prompt
    if kept is not None:  # rows of tokens that were not sampled are empty
        ends = np.diff(kept.offsets)[sampled].cumsum()
        kept = Kept(ids=kept.ids, offsets=np.concatenate([np.zeros(1, np.int64), ends]))
    return ScoreRequest(
        tokens=tokens.astype(np.int32, copy=False),
        positions=(sampled + shift).astype(np.int32),
        temperature=temperature,
        top_k=top_k,
        wants_entropies=wants_entropies,
        kept=kept,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    name: str  # the parameter's name in the transformers model
    dtype: str  # torch name without the prefix: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A version as the words in which its payload differs from a base payload."""

    # Checksum of the base payload. A version number would not do: a restarted trainer repeats
    # steps, and its weights may differ from what engines hold under the same number.
    base: int
    num_changed: int  # words
    word_bytes: int  # 2 or 4
    num_bytes: int  # indices and words together
    location: str  # in the transport's own format


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapProbe:
    """A passage and its logprobs under a version, computed by the trainer; see weights/probe.py."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of all tokens but the first
    dtype: str = ""  # that engines compute in; "" = that of the update's tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    version: int
    tensors: tuple[TensorSpec, ...]
    num_bytes: int  # of the full payload
    checksum: int  # of the full payload; see weights/packing.py
    transport: str  # "shm", "disk", "collective" or "ipc"
    location: str  # of the payload, in the transport's own format
    delta: Delta | None = None  # the change from its base, for an engine that holds that
    probe: SwapProbe | None = None  # for engines to check themselves after the swap
    policy: str = DEFAULT_POLICY  # that the version belongs to
