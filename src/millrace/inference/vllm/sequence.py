"""One completion at a vLLM server, and the chunks in which it is streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.core.records import CompletionChunk, Finish, Request


@dataclass(kw_only=True, slots=True, eq=False)
class ServedSequence:
    """One completion in progress, with the tokens it came with."""

    id: str  # at the server
    request: Request
    member: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    num_given: int = 0  # tokens of the partial completion
    num_streamed: int = 0
    num_kept: int | None = None  # tokens up to a stop string, once there is one
    ending: Finish | None = None  # why it was aborted at the server
    finish: Finish | None = None
    is_delivered: bool = False


def is_ready(sequences: Sequence[ServedSequence]) -> bool:
    """True if a completion has ended and was not delivered."""
    return any(s.finish is not None and not s.is_delivered for s in sequences)


def next_chunk(sequence: ServedSequence) -> CompletionChunk | None:
    """The tokens that were not streamed yet; None if they are too few, or were the last."""
    start, end = sequence.num_streamed, len(sequence.tokens)
    if start < 0:
        return None
    if sequence.finish is None:
        # Tokens that may turn out to be behind a stop string are held back.
        end = end if sequence.num_kept is None else sequence.num_kept
        if end - start < max(1, sequence.request.min_chunk_tokens):
            return None
    sequence.num_streamed = end if sequence.finish is None else -1
    return CompletionChunk(
        member=sequence.member,
        tokens=np.array(sequence.tokens[start:end], np.int32),
        logprobs=np.array(sequence.logprobs[start:end], np.float32),
        versions=np.array(sequence.versions[start:end], np.int32),
        finish=sequence.finish,
    )
