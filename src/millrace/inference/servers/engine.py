"""An engine whose tokens come from a server: vLLM or SGLang.

Promise: weights change only while the server is paused between two passes, or has no requests. A
completion carries the versions that the server itself reports for its tokens. Tokens that were
sampled after a commit leave this process only after the commit has been checked (weights/probe.py).
A server that dies, breaks a stream or refuses a call raises EngineLost, which ends the process; its
supervisor starts another.

Each completion is a request of its own at the server, so that a stop string ends one of several.
A server's prefix cache may not know of new weights, so the version is part of its key. A request
has its key for life, so one that is not prefilled yet is sent again after a pause.

The worker's main thread calls everything except prepare().
"""

import contextlib
import hashlib
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np

from millrace.core.errors import EngineLost, TaskError
from millrace.core.records import (
    CompletionChunk,
    FinishReason,
    Request,
    ScoreRequest,
    TokenLogprobs,
)
from millrace.inference.backend import EngineStats, FinishedCompletions
from millrace.inference.embedded.scheduling import sequence as sequences
from millrace.inference.embedded.scheduling.outputs import OutputProcessor, StopRules
from millrace.inference.servers.client import ServedChunk, ServerClient
from millrace.inference.servers.process import ServerProcess
from millrace.inference.servers.staging import StagedVersion, WeightStaging

_POLL_S = 0.01  # how long a step waits for tokens
_ABORT_AGAIN_S = 0.05  # an abort that overtakes its request has no effect
_ABORT_TIMEOUT_S = 60.0


@dataclass(kw_only=True, slots=True, eq=False)
class ServedSequence(sequences.Sequence):
    """A completion in progress at the server; it never has a slot."""

    num_given: int = 0  # sampled tokens that the server got with the prompt
    num_received: int = 0  # tokens since then, with those behind a stop string
    has_stop: bool = False
    ending: FinishReason | None = None  # why it was aborted at the server
    will_return: bool = False  # it was aborted there only for a pause

    @property
    def id(self) -> str:
        """The id that the server knows."""
        return f"{self.request.id}.{self.member}.{self.arrival}"


@dataclass(kw_only=True, eq=False)
class ServerEngine:
    """An EngineCore; see there for its methods."""

    client: ServerClient
    staging: WeightStaging
    rules: StopRules
    stop_ids: Sequence[int]
    max_context: int
    vocab_size: InitVar[int]
    kv: str
    resources: contextlib.ExitStack  # closed with the engine
    server: ServerProcess | None = None  # None = started by somebody else

    def __post_init__(self, vocab_size: int) -> None:
        self.version: int | None = self.client.version
        limits = {"max_context": self.max_context, "vocab_size": vocab_size}
        self._outputs = OutputProcessor(self.rules, sampled_by=ServedSequence.sampled, **limits)
        self._running: dict[str, ServedSequence] = {}  # by id at the server
        self._held: list[ServedSequence] = []  # wait for release_new()
        self._suspended: list[ServedSequence] = []  # wait for _resume(): not at the server
        self._holds_new = self._is_paused = False
        self._has_kv = True  # False if the pause has forgotten that of the running requests
        self._num_generated = self._num_prefilled = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._suspended) or self._outputs.has_pending

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def stats(self) -> EngineStats:
        if self.server is not None and (end := self.server.end) is not None:
            raise EngineLost(f"{self.client} {end}.")
        return EngineStats(
            running=len(self._running) + len(self._suspended),
            waiting=len(self._held),
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.staging.shapes

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        kind = ServedSequence
        members = self._outputs.open(request, stream=stream, kind=kind, records_kept=False)
        for sequence in members:
            sequence.num_given = sequence.num_streamed
        if self._holds_new:
            self._held += members
        else:
            self._send(members)

    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedCompletions]:
        """Take the tokens that have arrived, or wait a moment for some."""
        self._resume()
        self._receive(wait_s=0 if self._outputs.has_pending else _POLL_S)
        return self._outputs.take()

    def take_chunks(self, *, coalesced: bool = False) -> dict[str, list[CompletionChunk]]:
        return self._outputs.take_chunks(coalesced=coalesced)

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Logprobs at temperature 1 alone, which is what all servers report for given tokens."""
        was_paused = self._is_paused
        if was_paused:
            self.client.resume()
        scored = []
        for request in requests:
            if request.temperature != 1.0 or request.top_k or request.wants_entropies:
                product = self.client.product
                raise TaskError(f"A server of {product} scores tokens at temperature 1 only.")
            try:
                logprobs = self.client.prompt_logprobs(request.tokens.tolist())
            except (KeyError, TypeError, ValueError) as error:
                reason = f"scored a prompt without its logprobs ({error!r})"
                raise EngineLost(f"{self.client} {reason}.") from None
            scored.append(
                TokenLogprobs(
                    logprobs=np.array(logprobs, np.float32)[request.positions - 1],
                    top_ids=np.empty((len(request.positions), 0), np.int32),
                    top_logprobs=np.empty((len(request.positions), 0), np.float32),
                    version=self.version,
                )
            )
        if was_paused:
            self._stop()
        return scored

    def abort(
        self, ids: Iterable[str], *, finish: FinishReason = "abort"
    ) -> list[FinishedCompletions]:
        wanted = {*ids}
        ending = [s for s in self._running.values() if s.request.id in wanted]
        for sequence in ending:
            sequence.ending = sequence.ending or finish
        for waiting in (self._held, self._suspended):
            for sequence in [s for s in waiting if s.request.id in wanted]:
                waiting.remove(sequence)
                self._outputs.end(sequence, finish=finish)
        self._abort(ending)
        return self._outputs.take()

    def expire(
        self, before: int, adapters: Mapping[str, int] | None = None
    ) -> list[FinishedCompletions]:
        unfinished = (*self._running.values(), *self._held, *self._suspended)
        return self.abort(self._outputs.expired(before, unfinished), finish="expire")

    def interrupt(self) -> list[FinishedCompletions]:
        running = (*self._running.values(), *self._suspended)
        return self.abort(dict.fromkeys(s.request.id for s in running), finish="interrupt")

    def preempt_all(self) -> list[FinishedCompletions]:
        if not self._is_paused:
            self._stop(forget_kv=self.kv == "recompute")
        return []

    def hold_new(self) -> None:
        self._holds_new = True

    def release_new(self) -> None:
        self._holds_new = False
        held, self._held = self._held, []
        self._send(held)

    def prepare(self, tensors: Mapping[str, Any], *, version: int) -> StagedVersion:
        return self.staging.write(tensors, version=version)

    def commit(self, prepared: StagedVersion) -> None:
        was_paused, forget_kv = self._is_paused, self.kv == "recompute"
        self.version = None
        if not was_paused or (forget_kv and self._has_kv):
            self._stop(forget_kv=forget_kv)
        if prepared.is_adapter:
            self.client.load_adapter(prepared.folder.name)
        else:
            self.client.load_weights(prepared.folder.name)
        self.client.set_version(prepared.version)
        prepared.folder.cleanup()
        self.version = prepared.version
        if not was_paused:
            self._resume()

    def pause(self) -> None:
        if not self._is_paused:
            self._stop()

    def close(self) -> None:
        if self._is_paused and self.server is None:
            with contextlib.suppress(EngineLost):  # it may be what ended this engine
                self.client.resume()  # others may use it next
        self.client.close()
        if self.server is not None:
            self.server.close()
        self.resources.close()

    def sleep(self) -> None:
        raise NotImplementedError("needs Capability.SLEEP")

    def wake(self) -> None:
        raise NotImplementedError("needs Capability.SLEEP")

    def _stop(self, *, forget_kv: bool = False) -> None:
        """Pause the server. Requests that it does not keep end there until _resume(), and so do
        those without a token: they would continue from prompts cached under older weights."""
        keeps = self.client.keeps_requests
        ending = [s for s in self._running.values() if not (keeps and s.num_received)]
        for sequence in ending:
            sequence.will_return = True
        self._abort(ending)
        self.client.pause(forget_kv=forget_kv)
        self._is_paused, self._has_kv = True, not forget_kv

    def _resume(self) -> None:
        if not self._is_paused:
            return
        self.client.resume()
        self._is_paused = False
        suspended, self._suspended = self._suspended, []
        for sequence in suspended:
            self._send_again(sequence)

    def _send_again(self, sequence: ServedSequence) -> None:
        """Continue a sequence from its last token."""
        sequence.will_return = False
        sequence.num_given = len(sequence.tokens) - sequence.num_prompt
        sequence.num_received = 0
        sequence.arrival = self._outputs.num_arrived  # the server may still know the old id
        self._outputs.num_arrived += 1
        if not self._outputs.end_on_arrival(sequence):
            self._send([sequence])

    def _abort(self, ending: Sequence[ServedSequence]) -> None:
        """End requests at the server, and take their last tokens."""
        deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
        while left := [s.id for s in ending if s.id in self._running]:
            if time.monotonic() > deadline_s:
                raise EngineLost(f"{self.client} did not end {len(left)} aborted requests.")
            self.client.abort(left)
            again_s = time.monotonic() + _ABORT_AGAIN_S
            while time.monotonic() < again_s and any(s.id in self._running for s in ending):
                self._receive(wait_s=_POLL_S)

    def _send(self, new: Sequence[ServedSequence]) -> None:
        if self._is_paused:
            self._suspended += new
            return
        for sequence in new:
            request = sequence.request
            prompt = sequence.tokens.tolist()
            room = min(request.sampling.max_new_tokens, self.max_context - sequence.num_prompt)
            # Servers take few characters in a salt.
            salt = f"{self.version}-{hashlib.sha256(request.cache_salt.encode()).hexdigest()}"
            self._num_prefilled += len(prompt)
            self._running[sequence.id] = sequence
            self.client.generate(
                sequence.id,
                prompt,
                request.sampling,
                cache_salt=salt,
                max_tokens=room - sequence.num_given,
                stop_token_ids=list(self.stop_ids),
            )

    def _receive(self, *, wait_s: float) -> None:
        """Take all chunks that have arrived; waits for the first."""
        with contextlib.suppress(queue.Empty):
            self._take(self.client.chunks.get(timeout=wait_s))
            while True:
                self._take(self.client.chunks.get_nowait())

    def _take(self, chunk: ServedChunk) -> None:
        sequence = self._running.get(chunk.id)
        if sequence is None:  # the connection broke after its end
            return
        if chunk.error:
            raise EngineLost(f"{self.client} broke off a completion: {chunk.error}")
        if len(chunk.logprobs) != len(chunk.tokens):
            raise EngineLost(f"{self.client} sent tokens without logprobs.")
        self._num_generated += len(chunk.tokens)
        sequence.num_received += len(chunk.tokens)
        self._append(sequence, chunk)
        if chunk.finish is not None:
            self._end(sequence, chunk)

    def _append(self, sequence: ServedSequence, chunk: ServedChunk) -> None:
        """Add the new tokens, up to the first stop string."""
        stop = sequence.request.sampling.stop
        tokens = np.concatenate([sequence.tokens, np.array(chunk.tokens, np.int32)])
        first = end = len(sequence.tokens)
        while not sequence.has_stop and end < len(tokens):
            end += 1
            sampled = tokens[sequence.num_prompt : end]
            sequence.has_stop = bool(stop) and self.rules.ends_in_stop_string(sampled, stop)
            if sequence.has_stop:
                self.client.abort([sequence.id])
        logprobs = np.array(chunk.logprobs[: end - first], np.float32)
        versions = np.full(end - first, chunk.version, np.int32)
        sequence.tokens = tokens[:end]
        sequence.logprobs = np.concatenate([sequence.logprobs, logprobs])
        sequence.versions = np.concatenate([sequence.versions, versions])

    def _end(self, sequence: ServedSequence, chunk: ServedChunk) -> None:
        """Record the end at the server, and the versions of all tokens that it has sampled."""
        spans = chunk.spans or []
        if sequence.num_received != sum(end - start for start, end, _ in spans):
            num = sequence.num_received
            raise EngineLost(f"{self.client} reports versions {spans} of {num} tokens.")
        sampled = sequence.versions[sequence.num_given :]  # a view, without what is behind a stop
        for start, end, version in spans:
            sampled[start:end] = version
        natural: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}
        finish = natural.get(chunk.finish) or sequence.ending
        if sequence.has_stop:
            finish = "stop"
        if finish is None and not sequence.will_return:
            raise EngineLost(f"{self.client} ended a request by itself: {chunk.finish!r}.")
        del self._running[sequence.id]
        if finish is None:
            self._suspended.append(sequence)
        else:
            self._outputs.end(sequence, finish=finish)
