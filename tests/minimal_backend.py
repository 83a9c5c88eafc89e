"""A deliberately poor engine backend: plain transformers without a single capability.

It recomputes every sequence for every token, draws from torch's global generator, reports neither
kept ids nor routes, resumes nothing, and serves one version per completion. It shows what the core
of the engine contract is, and that a whole training needs no more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from millrace.core.errors import TaskError, WeightError
from millrace.core.protocols import Capability
from millrace.core.records import (
    Completion,
    CompletionChunk,
    FinishReason,
    Request,
    Sampling,
    ScoreRequest,
    TokenLogprobs,
)
from millrace.inference.backend import EngineSpec, EngineStats, FinishedCompletions
from millrace.models.loading import stop_token_ids


@dataclass(frozen=True, kw_only=True)
class MinimalBackend:
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def load(self, spec: EngineSpec) -> "MinimalEngine":
        return MinimalEngine(spec)


@dataclass(kw_only=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    num_sent: int = 0  # tokens in chunks
    was_ended: bool = False  # the last chunk was collected


@dataclass(kw_only=True)
class _Running:
    request: Request
    version: int
    streams: bool
    sequences: list[_Sequence]
    delivered: set[int] = field(default_factory=set)


class MinimalEngine:
    """An EngineCore. Each step samples one token for every sequence of every request."""

    def __init__(self, spec: EngineSpec) -> None:
        self.version: int | None = spec.version
        self._model = AutoModelForCausalLM.from_pretrained(spec.model_path).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
        self._eos_ids = set(stop_token_ids(self._model.generation_config, self._tokenizer))
        limit = self._model.config.max_position_embeddings
        self._max_context = spec.config.max_context or limit
        self._running: dict[str, _Running] = {}
        self._held: dict[str, _Running] = {}
        self._holds_new = False
        self._chunks: dict[str, list[CompletionChunk]] = {}  # not yet taken, by request
        self._coalesced: dict[str, list[CompletionChunk]] = {}
        self._num_generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._held),
            free_blocks=0,
            generated_tokens=self._num_generated,
            prefill_tokens=0,
            cached_tokens=0,
            preemptions=0,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def add_request(self, request: Request, *, stream: bool = False) -> None:
        if len(request.prompt) >= self._max_context:
            raise TaskError(
                f"The prompt has {len(request.prompt)} tokens, and the context holds"
                f" {self._max_context}; shorten it."
            )
        assert self.version is not None
        queue = self._held if self._holds_new else self._running
        queue[request.id] = _Running(
            request=request,
            version=self.version,
            streams=stream,
            sequences=[_Sequence() for _ in range(request.n)],
        )

    @torch.inference_mode()
    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedCompletions]:
        for running in self._running.values():
            self._sample(running)
            self._collect_chunks(running)
        ended = [self._ended(id) for id in list(self._running)]
        return [one for one in ended if one.completions]

    def take_chunks(self, *, coalesced: bool = False) -> dict[str, list[CompletionChunk]]:
        if not coalesced:
            taken, self._chunks = self._chunks, {}
            return taken
        taken, self._coalesced = self._coalesced, {}
        return {id: chunks for id, chunks in taken.items() if id in self._running}

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        raise TaskError("This backend cannot score tokens.")

    def abort(
        self, ids: Iterable[str], *, finish: FinishReason = "abort"
    ) -> list[FinishedCompletions]:
        aborted = []
        for id in ids:
            running = self._running.get(id) or self._held.get(id)
            if running is None:
                continue
            for sequence in running.sequences:
                sequence.finish = sequence.finish or finish
            self._collect_chunks(running)
            aborted.append(self._ended(id))
        return aborted

    def expire(self, before: int, adapters: object = None) -> list[FinishedCompletions]:
        old = [
            id
            for id, running in self._running.items()
            if running.request.expires
            and running.version < before
            and any(sequence.tokens for sequence in running.sequences)
        ]
        return self.abort(old, finish="expire")

    def interrupt(self) -> list[FinishedCompletions]:
        raise NotImplementedError("needs Capability.PARTIALS")

    def preempt_all(self) -> list[FinishedCompletions]:
        raise NotImplementedError("needs Capability.TOKEN_VERSIONS")

    def hold_new(self) -> None:
        self._holds_new = True

    def release_new(self) -> None:
        self._holds_new = False
        for running in self._held.values():
            assert self.version is not None
            running.version = self.version
        self._running |= self._held
        self._held = {}

    def prepare(self, tensors: Mapping[str, Any], *, version: int) -> Any:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != self.parameter_shapes():
            raise WeightError(f"Version {version} does not fit the model.")
        return version, {name: tensor.clone() for name, tensor in tensors.items()}

    def commit(self, prepared: Any) -> None:
        assert not self._running, "a completion has one version"
        self.version, tensors = prepared
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[name])

    def pause(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _sample(self, running: _Running) -> None:
        request = running.request
        alive = [sequence for sequence in running.sequences if not sequence.finish]
        rows = [[*request.prompt.tolist(), *sequence.tokens] for sequence in alive]
        output = self._model(input_ids=torch.tensor(rows), use_cache=False, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        logprobs = _distribution(logits, request.sampling)
        if request.sampling.temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial(logprobs.exp(), 1).squeeze(-1)
        for row, sequence in enumerate(alive):
            sequence.tokens.append(int(drawn[row]))
            sequence.logprobs.append(float(logprobs[row, drawn[row]]))
            sequence.finish = self._ending(sequence, request)
        self._num_generated += len(alive)

    def _ending(self, sequence: _Sequence, request: Request) -> FinishReason | None:
        if sequence.tokens[-1] in self._eos_ids:
            return "stop"
        if request.sampling.stop:
            text = self._tokenizer.decode(sequence.tokens)
            if any(stop in text for stop in request.sampling.stop):
                return "stop"
        num_tokens = len(sequence.tokens)
        is_full = len(request.prompt) + num_tokens >= self._max_context
        return "length" if is_full or num_tokens >= request.sampling.max_new_tokens else None

    def _collect_chunks(self, running: _Running) -> None:
        pending = self._coalesced if running.request.coalesce else self._chunks
        for member, sequence in enumerate(running.sequences if running.streams else []):
            if sequence.was_ended:
                continue
            start, sequence.num_sent = sequence.num_sent, len(sequence.tokens)
            sequence.was_ended = sequence.finish is not None
            pending.setdefault(running.request.id, []).append(
                CompletionChunk(
                    member=member,
                    tokens=np.array(sequence.tokens[start:], np.int32),
                    logprobs=np.array(sequence.logprobs[start:], np.float32),
                    versions=np.full(len(sequence.tokens) - start, running.version, np.int32),
                    finish=sequence.finish,
                )
            )

    def _ended(self, id: str) -> FinishedCompletions:
        running = self._running.get(id) or self._held[id]
        sequences = dict(enumerate(running.sequences))
        new = [i for i, one in sequences.items() if one.finish and i not in running.delivered]
        running.delivered.update(new)
        is_last = len(running.delivered) == running.request.n
        if is_last:
            self._running.pop(id, None)
            self._held.pop(id, None)
        completions = {member: self._completion(running, member) for member in new}
        return FinishedCompletions(id=id, completions=completions, is_last=is_last)

    def _completion(self, running: _Running, member: int) -> Completion:
        sequence = running.sequences[member]
        assert sequence.finish is not None
        has_eos = bool(sequence.tokens) and sequence.tokens[-1] in self._eos_ids
        text = self._tokenizer.decode(sequence.tokens[:-1] if has_eos else sequence.tokens)
        cuts = [text.find(stop) for stop in running.request.sampling.stop if stop in text]
        return Completion(
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            versions=np.full(len(sequence.tokens), running.version, np.int32),
            finish=sequence.finish,
            text=text[: min(cuts)] if cuts else text,
        )


def _distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[N, V] logprobs after temperature and truncation."""
    scores, no_ids = logits / (sampling.temperature or 1.0), torch.empty(0)
    if sampling.temperature > 0 and sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(no_ids, scores)
    if sampling.temperature > 0 and sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(no_ids, scores)
    if sampling.temperature > 0 and sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(no_ids, scores)
    return scores.log_softmax(-1)
