"""An engine whose tokens come from a vLLM server.

Promise: weights change only while the server is paused between two passes. A completion carries the
versions that vLLM itself reports for its tokens. Tokens that were sampled after a commit leave
this process only after the commit has been checked (weights/probe.py). A server that dies, breaks a
stream or refuses a call raises EngineLost, which ends the process; its supervisor starts another.

Each completion is a request of its own at the server, so that a stop string ends one of several.
The KV of a prompt is reused only by requests that were sent under the same version: vLLM's prefix
cache does not know of new weights, so the version is part of its key.

The worker's main thread calls everything except prepare().
"""

import contextlib
import hashlib
import itertools
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.core.errors import EngineLost, TaskError
from millrace.core.records import (
    Completion,
    CompletionChunk,
    Finish,
    Request,
    ScoreRequest,
    TokenLogprobs,
)
from millrace.inference.backend import EngineStats, FinishedCompletions
from millrace.inference.embedded.scheduling.outputs import StopRules
from millrace.inference.embedded.scheduling.sequence import check_request
from millrace.inference.vllm.client import ServedChunk, VllmClient
from millrace.inference.vllm.sequence import ServedSequence, is_ready, next_chunk
from millrace.inference.vllm.server import VllmServer
from millrace.inference.vllm.staging import StagedVersion, WeightStaging

_POLL_S = 0.01  # how long a step waits for tokens
_ABORT_AGAIN_S = 0.25  # an abort that overtakes its request has no effect
_ABORT_TIMEOUT_S = 60.0


class VllmEngine:
    """An EngineCore; see there for its methods."""

    def __init__(
        self,
        client: VllmClient,
        *,
        staging: WeightStaging,
        rules: StopRules,
        stop_ids: Sequence[int],
        max_context: int,
        vocab_size: int,
        kv: str,
        folder: tempfile.TemporaryDirectory[str],  # where versions are staged
        server: VllmServer | None = None,  # None = started by somebody else
    ) -> None:
        self.version: int | None = client.version
        self._client = client
        self._staging = staging
        self._rules = rules
        self._stop_ids = stop_ids
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._kv = kv
        self._folder = folder
        self._server = server
        self._requests: dict[str, list[ServedSequence]] = {}  # not delivered completely, by id
        self._running: dict[str, ServedSequence] = {}  # by id at the server
        self._held: list[ServedSequence] = []  # wait for release_new()
        self._streams: dict[str, list[ServedSequence]] = {}  # with tokens to stream, by request
        self._numbers = itertools.count()
        self._holds_new = self._is_paused = False
        self._expired_before = 0
        self._num_generated = self._num_prefilled = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running) or any(map(is_ready, self._requests.values()))

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def stats(self) -> EngineStats:
        if self._server is not None and (end := self._server.end) is not None:
            raise EngineLost(f"{self._client} {end}.")
        return EngineStats(
            running=len(self._running),
            waiting=len(self._held),
            free_blocks=0,
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
            cached_tokens=0,
            preemptions=0,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._staging.shapes

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        if request.id in self._requests:
            raise TaskError(f"Request {request.id!r} is already here; give each its own id.")
        check_request(request, max_context=self._max_context, vocab_size=self._vocab_size)
        sequences = [self._sequence(request, member) for member in range(request.n)]
        self._requests[request.id] = sequences
        if stream:
            self._streams[request.id] = sequences
        for sequence in sequences:
            sequence.finish = self._finish_on_arrival(sequence)
            if sequence.finish is None and self._holds_new:
                self._held.append(sequence)
            elif sequence.finish is None:
                self._send(sequence)

    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedCompletions]:
        """Take the tokens that have arrived, or wait a moment for some."""
        self._resume()
        self._receive(wait_s=0 if any(map(is_ready, self._requests.values())) else _POLL_S)
        return self._finished()

    def take_chunks(self, *, coalesced: bool = False) -> dict[str, list[CompletionChunk]]:
        chunks: dict[str, list[CompletionChunk]] = {}
        for id, sequences in list(self._streams.items()):
            if sequences[0].request.coalesce != coalesced:
                continue
            is_over = all(sequence.finish is not None for sequence in sequences)
            if is_over:
                del self._streams[id]
            if not (is_over and coalesced):
                new = [chunk for sequence in sequences if (chunk := next_chunk(sequence))]
                chunks |= {id: new} if new else {}
        return chunks

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Logprobs at temperature 1 alone: vLLM reports neither others nor entropies."""
        was_paused = self._is_paused
        self._resume()
        scored = []
        for request in requests:
            if request.temperature != 1.0 or request.top_k or request.wants_entropies:
                raise TaskError("A vLLM server scores tokens at temperature 1 only.")
            logprobs = self._client.prompt_logprobs(request.tokens.tolist())
            scored.append(
                TokenLogprobs(
                    logprobs=np.array(logprobs, np.float32)[request.positions - 1],
                    top_ids=np.empty((len(request.positions), 0), np.int32),
                    top_logprobs=np.empty((len(request.positions), 0), np.float32),
                    version=self.version,
                )
            )
        if was_paused:
            self.pause()
        return scored

    def abort(self, ids: Iterable[str], *, finish: Finish = "abort") -> list[FinishedCompletions]:
        ending = [s for id in ids for s in self._requests.get(id, []) if s.finish is None]
        for sequence in ending:
            sequence.ending = sequence.ending or finish
            if sequence in self._held:
                self._held.remove(sequence)
                sequence.finish = finish
        deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
        while left := [sequence.id for sequence in ending if sequence.finish is None]:
            if time.monotonic() > deadline_s:
                raise EngineLost(f"{self._client} did not end {len(left)} aborted requests.")
            self._client.abort(left)
            again_s = time.monotonic() + _ABORT_AGAIN_S
            while time.monotonic() < again_s and any(s.finish is None for s in ending):
                self._receive(wait_s=_POLL_S)
        return self._finished()

    def expire(self, before: int) -> list[FinishedCompletions]:
        self._expired_before = max(before, self._expired_before)
        old = [
            id
            for id, sequences in self._requests.items()
            if sequences[0].request.expires
            and any(min(s.versions or [before]) < before for s in sequences)
        ]
        return self.abort(old, finish="expire")

    def interrupt(self) -> list[FinishedCompletions]:
        running = dict.fromkeys(sequence.request.id for sequence in self._running.values())
        return self.abort(running, finish="interrupt")

    def preempt_all(self) -> list[FinishedCompletions]:
        self.pause()
        return []

    def hold_new(self) -> None:
        self._holds_new = True

    def release_new(self) -> None:
        self._holds_new = False
        held, self._held = self._held, []
        for sequence in held:
            self._send(sequence)

    def prepare(self, tensors: Mapping[str, Any], *, version: int) -> StagedVersion:
        return self._staging.write(tensors, version=version)

    def commit(self, prepared: StagedVersion) -> None:
        was_paused = self._is_paused
        self.version = None
        self._client.pause(forget_kv=self._kv == "recompute")
        self._is_paused = True
        if prepared.is_adapter:
            self._client.load_adapter(prepared.folder.name)
        else:
            self._client.load_weights(prepared.folder.name)
        self._client.set_version(prepared.version)
        prepared.folder.cleanup()
        self.version = prepared.version
        if not was_paused:
            self._resume()

    def pause(self) -> None:
        if not self._is_paused:
            self._client.pause()
            self._is_paused = True

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    def sleep(self) -> None:
        raise NotImplementedError("needs Capability.SLEEP")

    def wake(self) -> None:
        raise NotImplementedError("needs Capability.SLEEP")

    def _resume(self) -> None:
        if self._is_paused:
            self._client.resume()
            self._is_paused = False

    def _sequence(self, request: Request, member: int) -> ServedSequence:
        id = f"{request.id}.{member}.{next(self._numbers)}"
        done = request.partial
        if done is None:
            return ServedSequence(id=id, request=request, member=member)
        return ServedSequence(
            id=id,
            request=request,
            member=member,
            tokens=done.tokens.tolist(),
            logprobs=done.logprobs.tolist(),
            versions=done.versions.tolist(),
            num_given=len(done.tokens),
            num_streamed=len(done.tokens),
        )

    def _finish_on_arrival(self, sequence: ServedSequence) -> Finish | None:
        """How a partial completion had already ended; None if it goes on."""
        if not sequence.tokens:
            return None
        sampled, stop = np.array(sequence.tokens), sequence.request.sampling.stop
        if sampled[-1] in self._stop_ids:
            return "stop"
        if stop and self._rules.ends_in_stop_string(sampled, stop):
            return "stop"
        if self._max_tokens(sequence) <= 0:
            return "length"
        is_old = min(sequence.versions) < self._expired_before
        return "expire" if sequence.request.expires and is_old else None

    def _max_tokens(self, sequence: ServedSequence) -> int:
        request = sequence.request
        room = self._max_context - len(request.prompt)
        return min(request.sampling.max_new_tokens, room) - sequence.num_given

    def _send(self, sequence: ServedSequence) -> None:
        request = sequence.request
        prompt = [*request.prompt.tolist(), *sequence.tokens]
        # vLLM takes few characters in a salt.
        salt = f"{self.version}-{hashlib.sha256(request.cache_salt.encode()).hexdigest()}"
        self._num_prefilled += len(prompt)
        self._running[sequence.id] = sequence
        self._client.generate(
            sequence.id,
            prompt,
            request.sampling,
            max_tokens=self._max_tokens(sequence),
            stop_ids=self._stop_ids,
            cache_salt=salt,
        )

    def _receive(self, *, wait_s: float) -> None:
        """Take all chunks that have arrived; waits for the first."""
        with contextlib.suppress(queue.Empty):
            self._take(self._client.chunks.get(timeout=wait_s))
            while True:
                self._take(self._client.chunks.get_nowait())

    def _take(self, chunk: ServedChunk) -> None:
        sequence = self._running.get(chunk.id)
        if sequence is None:  # the connection broke after its end
            return
        if chunk.error:
            raise EngineLost(f"{self._client} broke off a completion: {chunk.error}")
        if len(chunk.logprobs) != len(chunk.tokens):
            raise EngineLost(f"{self._client} sent tokens without logprobs.")
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(chunk.version)
            self._look_for_stop(sequence)
        self._num_generated += len(chunk.tokens)
        if chunk.finish is not None:
            self._end(sequence, chunk)

    def _look_for_stop(self, sequence: ServedSequence) -> None:
        stop = sequence.request.sampling.stop
        if not stop or sequence.num_kept is not None:
            return
        if self._rules.ends_in_stop_string(np.array(sequence.tokens), stop):
            sequence.num_kept = len(sequence.tokens)
            self._client.abort([sequence.id])

    def _end(self, sequence: ServedSequence, chunk: ServedChunk) -> None:
        """Record the end, and the versions that vLLM reports for all tokens it has sampled."""
        num_new = len(sequence.tokens) - sequence.num_given
        spans = chunk.spans or []
        if num_new != sum(end - start for start, end, _ in spans):
            raise EngineLost(f"{self._client} reports versions {spans} of {num_new} tokens.")
        for start, end, version in spans:
            first = sequence.num_given
            sequence.versions[first + start : first + end] = [version] * (end - start)
        natural: dict[str, Finish] = {"stop": "stop", "length": "length"}
        finish = natural.get(chunk.finish or "")
        if sequence.num_kept is not None:
            for values in (sequence.tokens, sequence.logprobs, sequence.versions):
                del values[sequence.num_kept :]
            finish = "stop"
        sequence.finish = finish or sequence.ending
        if sequence.finish is None:
            raise EngineLost(f"{self._client} ended a request by itself: {chunk.finish!r}.")
        del self._running[sequence.id]

    def _finished(self) -> list[FinishedCompletions]:
        """The completions that have ended since the last call."""
        finished = []
        for id, sequences in list(self._requests.items()):
            new = [s for s in sequences if s.finish is not None and not s.is_delivered]
            for sequence in new:
                sequence.is_delivered = True
            is_last = all(sequence.is_delivered for sequence in sequences)
            if is_last:
                del self._requests[id]
            if new:
                completions = {s.member: self._completion(s) for s in new}
                finished.append(
                    FinishedCompletions(id=id, completions=completions, is_last=is_last)
                )
        return finished

    def _completion(self, sequence: ServedSequence) -> Completion:
        assert sequence.finish is not None
        tokens = np.array(sequence.tokens, np.int32)
        return Completion(
            tokens=tokens,
            logprobs=np.array(sequence.logprobs, np.float32),
            versions=np.array(sequence.versions, np.int32),
            finish=sequence.finish,
            text=self._rules.text(tokens, sequence.request.sampling.stop),
        )
