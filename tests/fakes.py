"""Stand-ins and ready-made records for tests."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from millrace.core.records import (
    Completion,
    Episode,
    Group,
    Kept,
    Request,
    Rollout,
    Sampling,
    Score,
    Task,
    Turn,
)
from millrace.core.weight_update import WeightUpdate


def make_rollout(
    *,
    prompt_tokens: int = 3,
    sampled_tokens: int = 4,
    versions: int | list[int] = 0,
    kept: bool = False,
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


class ScriptedEngine:
    """An Engine whose completions are the given texts, one token per character."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.expired_before: list[int] = []
        self.is_paused = False

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        return [make_completion(self.texts[i % len(self.texts)]) for i in range(request.n)]

    async def swap(self, update: WeightUpdate) -> int:
        return update.version

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    async def expire(self, before: int) -> None:
        self.expired_before.append(before)

    async def pause(self) -> None:
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


class NoScoring:
    """Scoring that remembers which episodes came, and whether it was left."""

    def __init__(self) -> None:
        self.added: dict[int, Episode] = {}
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.is_closed = True

    def add(self, index: int, episode: Episode) -> None:
        self.added[index] = episode


class CharacterTokenizer:
    """The part of a Hugging Face tokenizer that a Renderer uses; one token per character."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]
