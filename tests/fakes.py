"""Stand-ins and ready-made records for tests."""

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from millrace.core.completions import chunk_of
from millrace.core.protocols import Capability, OnCompletion, OnTokens
from millrace.core.records import (
    Completion,
    CompletionChunk,
    Episode,
    Group,
    Kept,
    Request,
    Rollout,
    Sampling,
    Score,
    ScoreRequest,
    Task,
    TokenLogprobs,
    Turn,
    WeightUpdate,
)


def make_rollout(
    *,
    prompt_tokens: int = 3,
    sampled_tokens: int = 4,
    versions: int | list[int] = 0,
    kept: bool = False,
    routes: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
) -> Rollout:
    rng = np.random.default_rng(seed)
    length = prompt_tokens + sampled_tokens
    mask = np.arange(length) >= prompt_tokens
    tokens = rng.integers(0, 10, length).astype(np.int32)
    rows = None
    if kept:
        sizes = np.where(mask, 2, 0)
        ids = np.concatenate([np.array([token, 99], np.int32) for token in tokens[mask]])
        rows = Kept(ids=ids, offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    stamped = np.full(length, -1, np.int32)
    stamped[mask] = versions
    return Rollout(
        tokens=tokens,
        mask=mask,
        engine_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=stamped,
        sampling=Sampling(temperature=temperature, top_k=2 if kept else 0),
        kept=rows,
        routes=rng.integers(0, 8, (length, 2, 2)).astype(np.uint8) if routes else None,
    )


def make_group(
    number: int = 0, *, versions: int | list[int] = 0, size: int = 2, **rollout
) -> Group:
    episodes = tuple(
        Episode(
            turns=(Turn(prompt="p", completion="c", finish="stop"),),
            rollouts=(make_rollout(versions=versions, seed=number * 100 + i, **rollout),),
        )
        for i in range(size)
    )
    return Group(
        number=number,
        task=Task(prompt=f"task {number}"),
        episodes=episodes,
        scores=tuple(Score(total=float(i), parts={"f": float(i)}) for i in range(size)),
        advantages=np.linspace(-1, 1, size).astype(np.float32),
    )


def make_update(version: int, *, transport: str = "shm", location: str = "") -> WeightUpdate:
    return WeightUpdate(
        version=version,
        tensors=(),
        num_bytes=0,
        checksum=0,
        transport=transport,
        location=location,
    )


class ScriptedEngine:
    """An Engine whose completions are the given texts, one token per character."""

    capabilities = frozenset(Capability)

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.expired_before: list[int] = []
        self.is_paused = False

    async def generate(
        self,
        request: Request,
        on_tokens: OnTokens | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        self.requests.append(request)
        done = [make_completion(self.texts[i % len(self.texts)]) for i in range(request.n)]
        if on_tokens is not None:
            for member, completion in enumerate(done):
                on_tokens(make_chunk(completion, member=member))
        for member, completion in enumerate(done if on_completion else []):
            on_completion(member, completion)  # pyright: ignore
        return done

    async def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        raise NotImplementedError("ScriptedEngine has no model to score with")

    async def swap(self, update: WeightUpdate) -> int:
        return update.version

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    async def expire(self, before: int, adapters: object = None) -> None:
        self.expired_before.append(before)

    async def pause(self, *, sleep: bool = False) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False


def make_completion(text: str, *, version: int = 0) -> Completion:
    num_tokens = max(len(text), 1)
    return Completion(
        tokens=np.array([ord(c) for c in text or "."], np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.full(num_tokens, version, np.int32),
        finish="stop",
        text=text,
    )


def make_chunk(completion: Completion, *, member: int = 0) -> CompletionChunk:
    """All of it at once."""
    return chunk_of(completion, member=member, finish=completion.finish)


class Listener:
    """Hears what an engine tells of a request's completions, chunk by chunk."""

    def __init__(self) -> None:
        self.chunks: list[CompletionChunk] = []

    def __call__(self, chunk: CompletionChunk) -> None:
        self.chunks.append(chunk)

    def assert_received(self, completions: Sequence[Completion], *, after: int = 0) -> None:
        """Exactly these, from token number `after` on, and each one's end with its last chunk."""
        for member, completion in enumerate(completions):
            own = [chunk for chunk in self.chunks if chunk.member == member]
            assert [chunk.finish for chunk in own] == [None] * (len(own) - 1) + [completion.finish]
            for name in ("tokens", "logprobs", "versions"):
                told = np.concatenate([getattr(chunk, name) for chunk in own])
                np.testing.assert_array_equal(told, getattr(completion, name)[after:])
            assert _rows(own) == _rows([make_chunk(completion)])[after:]


def _rows(chunks: Sequence[CompletionChunk]) -> list[list[int]]:
    kept = [chunk.kept for chunk in chunks if chunk.kept is not None]
    return [row.tolist() for k in kept for row in np.split(k.ids, k.offsets[1:-1])[: _num(k)]]


def _num(kept: Kept) -> int:
    return len(kept.offsets) - 1


class FakeScoring:
    """Scoring that remembers which episodes were added, in order, and whether it was closed."""

    takes_episodes = True

    def __init__(self, *, stream_callback=lambda request: None, token_rewards=None) -> None:
        self.added: dict[int, Episode] = {}
        self.is_closed = False
        self.stream_callback = stream_callback
        self.token_rewards = token_rewards

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.is_closed = True

    def add(self, index: int, episode: Episode) -> None:
        self.added[index] = episode


class CharacterTokenizer:
    """The part of a Hugging Face tokenizer that the controller uses; one token per character."""

    chat_template = None
    all_special_ids = ()
    added_tokens_decoder: ClassVar[dict] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int], **settings: bool) -> str:
        return "".join(map(chr, tokens))


class FakeTasks:
    """A task stream whose tasks are their numbers; remembers which were finished."""

    def __init__(self) -> None:
        self.finished: list[int] = []

    def task(self, number: int) -> Task:
        return Task(prompt=str(number))

    def draw_of(self, number: int) -> int | None:
        return None

    def observe(self, number: int, solve_rate: float) -> None:
        """Keep no statistics."""

    def finish(self, number: int) -> None:
        self.finished.append(number)

    def state(self) -> dict[str, object]:
        return {}


class FakeScorers:
    """A scorer pool whose groups are played with their scores; subclasses override score()."""

    def open(self, *, number: int, task: Task) -> FakeScoring:
        return FakeScoring()

    async def score(self, group: Group, scoring: FakeScoring) -> Group:
        return group

    async def shape(self, group: Group) -> Group:
        return group

    def with_batch_advantages(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)


class FakeClock:
    """A clock that moves only when a test or a sleep moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
