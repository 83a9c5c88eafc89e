"""What a pool knows of a request that its engine has not answered yet.

Promise: if the engine is lost, what it has told is enough to go on from: tokens, logprobs, versions
and kept ids. Routes come with the end only; those of a lost engine are lost, and who goes on from
these tokens notes where it sends them itself. Who listens hears every token once, and each end and
each completion once, however often a completion changes its engine.

Runs on the controller's event loop; torch-free.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.core.completions import chunk_of, cut, joined
from millrace.core.protocols import OnCompletion, OnTokens
from millrace.core.records import Completion, CompletionChunk, Request


class Audience:
    """Who listens to a request of n completions, if anybody does."""

    def __init__(self, on_tokens: OnTokens | None, on_completion: OnCompletion | None) -> None:
        self.wants_tokens = on_tokens is not None
        self.wants_completions = on_completion is not None
        self._on_tokens = on_tokens
        self._on_completion = on_completion
        self._ended: set[int] = set()  # members whose end was told

    def tell(self, piece: CompletionChunk) -> None:
        if self._on_tokens is None or piece.member in self._ended:
            return
        finish = None if piece.finish == "interrupt" else piece.finish  # it will be resumed
        if finish is not None:
            self._ended.add(piece.member)
        if len(piece.tokens) or finish is not None:
            self._on_tokens(replace(piece, finish=finish))

    def tell_completion(self, completion: Completion, *, member: int) -> None:
        if self._on_completion is not None:
            self._on_completion(member, completion)

    def tell_abort(self, completion: Completion, *, member: int) -> None:
        """Nobody resumes this one."""
        self.tell_completion(completion, member=member)
        self.tell(
            CompletionChunk(
                member=member,
                tokens=np.empty(0, dtype=np.int32),
                logprobs=np.empty(0, dtype=np.float32),
                versions=np.empty(0, dtype=np.int32),
                finish="abort",
            )
        )


class Transcript:
    """What one engine tells of a request, or of what is resumed of one."""

    def __init__(self, request: Request, *, audience: Audience, first: int = 0) -> None:
        """`first`: the number, among those the audience hears, of the request's first member."""
        self._request = request
        self._audience = audience
        self._first = first
        self._pieces: list[list[CompletionChunk]] = [[] for _ in range(request.n)]  # by member
        self._ended: dict[int, Completion] = {}  # likewise, of those that are told when they end

    def hear(self, piece: CompletionChunk) -> None:
        self._pieces[piece.member].append(piece)
        self._audience.tell(replace(piece, member=self._first + piece.member))

    def hear_end(self, member: int, completion: Completion) -> None:
        if completion.finish != "interrupt":  # it will be resumed
            self._ended[member] = completion
            self._audience.tell_completion(completion, member=self._first + member)

    def completions(self) -> list[Completion]:
        """All members as far as they are known, to be resumed. One that has ended without that
        being told is not told apart: whoever resumes it finds that out, and says how."""
        truncates = self._request.sampling.truncates
        return [
            self._ended.get(member) or joined(self._known(member), truncates=truncates)
            for member in range(self._request.n)
        ]

    def catch_up(self, completions: Sequence[Completion]) -> None:
        """Tell what these have and was not told: they go on elsewhere, and what is told from there
        follows them."""
        for member, completion in enumerate(completions):
            if completion.finish != "interrupt":
                continue
            rest = cut(completion, sum(len(part.tokens) for part in self._known(member)))
            self.hear(chunk_of(rest, member=member))

    def _known(self, member: int) -> list[Completion | CompletionChunk]:
        partial = self._request.partial
        return [*([] if partial is None else [partial]), *self._pieces[member]]
