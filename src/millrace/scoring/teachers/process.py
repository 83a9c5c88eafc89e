"""What teachers and references share: their settings, their model, and their scorer.

The model runs in a process here, or on a server: the /score route of `millrace serve MODEL
--scorers N` returns what a local process would return for the same tokens. All of this runs on the
controller's event loop. L = tokens of a rollout.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from millrace.cluster.messages import ScoreTokens, StartTeacher, Swapped, SwapWeights, TokensScored
from millrace.config import RunConfig
from millrace.config.section import Dtype, PositiveInt
from millrace.core.errors import ConfigError, ScoreError, WorkerError
from millrace.core.plugins import plugin
from millrace.core.records import (
    Group,
    Rollout,
    ScoreRequest,
    ScorerResult,
    Task,
    TokenLogprobs,
    TokenScores,
    WeightUpdate,
)
from millrace.models.directory import load_tokenizer, max_positions, text_config
from millrace.scoring.model_process import MODEL_CALLS, ModelProcess, ModelScorer
from millrace.scoring.scorer_type import CallSettings, RunInfo, ScorerContext
from millrace.scoring.services.endpoint import Endpoint

SWAP_ATTEMPTS = 2
MAX_SEQUENCES = 4096  # per HTTP request; the server refuses more
MAX_TOKENS = 262_144  # likewise, of several sequences
MAX_NUMBERS = 4_000_000  # in the answer for several sequences
MAX_ANSWER_BYTES = 64 * 2**20


class TeacherProcess(ModelProcess):
    """A self-teacher saves its weights in a file, which a restarted process loads."""

    ROLE = "Teacher"
    MODULE = "millrace.scoring.teachers.worker"
    max_context: int | None = None

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        reply = await self.ask(ScoreTokens(requests=list(requests)), timeout_s=timeout_s)
        assert isinstance(reply, TokensScored)
        return reply.logprobs

    async def swap(self, update: WeightUpdate) -> int:
        """Load an update, also into a restarted process. Returns the version that it holds then."""
        for _ in range(SWAP_ATTEMPTS):
            with contextlib.suppress(WorkerError):  # the restart is counted
                reply = await self.ask_once(SwapWeights(update=update), timeout_s=None)
                assert isinstance(reply, Swapped)
                return reply.version
        return update.version  # both processes died; the next version will come


@plugin
class LogprobModelSettings:
    """How a process that computes logprobs is run. The fields are keys of [[scorers]]."""

    dtype: Dtype = "auto"  # "auto" is bfloat16 on CUDA and float32 on a CPU
    threads: PositiveInt = 1  # CPU threads
    pass_tokens: PositiveInt = 8192  # of one forward pass; a longer sequence gets one of its own
    logprob_chunk: PositiveInt = 1024  # number of tokens whose logits are held in memory at once

    def call_settings(self, *, num_workers: int) -> CallSettings:
        """One call per group, because its rollouts share their prompt."""
        return replace(MODEL_CALLS, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """By default any task will do."""

    def start_message(
        self, config: RunConfig, *, device: str, model: str, **more: Any
    ) -> StartTeacher:
        """`more`: further fields of StartTeacher."""
        own = {field.name: getattr(self, field.name) for field in fields(LogprobModelSettings)}
        plain = config.model_dump(mode="json")
        return StartTeacher(config=plain, settings=own, device=device, model_path=model, **more)

    def make_process(
        self, name: str, *, model: str, context: ScorerContext, **self_teacher: Any
    ) -> TeacherProcess:
        """Build a process that is not started yet. `self_teacher`: more fields of StartTeacher."""
        config = context.run_info.config
        device = config.placement.model(name)
        process = TeacherProcess(
            name,
            start=self.start_message(config, device=device, model=model, **self_teacher),
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )
        text = text_config(model, trust_remote_code=config.model.trust_remote_code)
        limit = max_positions(text)
        process.max_context = limit if limit is not None else context.run_info.max_context
        return process


def scatter(values: np.ndarray, rollout: Rollout) -> np.ndarray:
    """[sampled, ...] -> [L, ...], with zeros at the other positions."""
    scattered = np.zeros((len(rollout.tokens), *values.shape[1:]), values.dtype)
    scattered[rollout.mask] = values
    return scattered


def check_same_vocabulary(model: str, run: RunInfo, *, num_top: int, name: str) -> None:
    """Raise ConfigError unless token ids mean the same to the model and to the policy."""
    remote_code = run.config.model.trust_remote_code
    setting = f"model of scorer {name!r}"
    config = text_config(model, trust_remote_code=remote_code, setting=setting)
    theirs = load_tokenizer(model, trust_remote_code=remote_code).get_vocab()
    ours = run.tokenizer.get_vocab()
    if theirs != ours:
        example = min(theirs.items() ^ ours.items(), key=lambda item: item[::-1])[0]
        raise ConfigError(
            f"Scorer {name!r}: the tokenizer of {model!r} differs from that of"
            f" {run.config.model.path!r} (for example in {example!r}), so its logprobs would belong"
            " to other tokens; choose a model with the same tokenizer."
        )
    smallest = min(config.vocab_size, run.vocab_size)
    if config.vocab_size < len(ours):
        raise ConfigError(
            f"Scorer {name!r} knows {smallest} tokens, and the policy's tokenizer has {len(ours)};"
            " choose another model."
        )
    check_top_k(num_top, num_tokens=smallest, name=name)


def check_top_k(num_top: int, *, num_tokens: int, name: str) -> None:
    if num_top >= num_tokens:
        raise ConfigError(
            f"Scorer {name!r} knows {num_tokens} tokens, and top_k = {num_top}; lower top_k."
        )


class _EncodedLogprobs(msgspec.Struct, frozen=True):
    """TokenLogprobs with its arrays as little-endian bytes, which are base64 in JSON."""

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    version: int | None


class _Answer(msgspec.Struct, frozen=True):
    vocabulary: str
    num_tokens: int
    max_context: int
    sequences: list[_EncodedLogprobs]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RemoteTeacher:
    """A teacher on a server. It is checked before anything is trained, and every answer carries a
    checksum of its vocabulary, because another model may be served at the same address later."""

    name: str
    endpoint: Endpoint
    vocabulary: str  # checksum of the policy's
    vocab_size: int  # of the policy
    num_top: int

    num_lost = 0  # the server restarts its own processes
    max_context = None  # the server refuses longer sequences

    async def start(self) -> None:
        """Raises ConfigError if the model does not fit, ScoreError if there is no answer."""
        await self.endpoint.start()
        answer = await self._post([])
        num_tokens = min(answer.num_tokens, self.vocab_size)
        check_top_k(self.num_top, num_tokens=num_tokens, name=self.name)

    async def close(self) -> None:
        await self.endpoint.close()

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises as Endpoint.post does. The endpoint has its own timeout."""
        parts = list(_split(requests))
        answers = await asyncio.gather(*(self._post(part) for part in parts))
        return [
            self._decode(encoded, request)
            for answer, part in zip(answers, parts, strict=True)
            for encoded, request in zip(answer.sequences, part, strict=True)
        ]

    async def _post(self, requests: Sequence[ScoreRequest]) -> _Answer:
        body = await self.endpoint.post({"sequences": [_body(request) for request in requests]})
        try:
            answer = msgspec.convert(body, _Answer)
        except msgspec.ValidationError as error:
            raise self.endpoint.unusable(f"sent an invalid answer: {error}") from None
        if answer.vocabulary != self.vocabulary:
            raise ConfigError(
                f"Scorer {self.name!r}: the tokenizer of the model at its url differs from that of"
                " the policy, so its logprobs would belong to other tokens; serve a model with the"
                " same tokenizer."
            )
        if len(answer.sequences) != len(requests):
            counts = f"{len(answer.sequences)} sequences instead of {len(requests)}"
            raise self.endpoint.unusable(f"answered for {counts}")
        return answer

    def _decode(self, encoded: _EncodedLogprobs, request: ScoreRequest) -> TokenLogprobs:
        num, top = len(request.positions), request.top_k
        logprobs = self._array(encoded.logprobs, "<f4", num)
        top_ids = self._array(encoded.top_ids, "<i4", num * top)
        top_logprobs = self._array(encoded.top_logprobs, "<f4", num * top)
        if not (np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()):
            raise self.endpoint.unusable("answered with logprobs that are not finite")
        if ((top_ids < 0) | (top_ids >= self.vocab_size)).any():
            raise self.endpoint.unusable("answered with tokens that the policy does not have")
        return TokenLogprobs(
            logprobs=logprobs,
            top_ids=top_ids.reshape(num, top),
            top_logprobs=top_logprobs.reshape(num, top),
            version=encoded.version,
        )

    def _array(self, data: bytes, dtype: str, size: int) -> np.ndarray:
        if len(data) != 4 * size:
            raise self.endpoint.unusable(f"answered with {len(data)} bytes instead of {4 * size}")
        return np.frombuffer(data, dtype)


def _body(request: ScoreRequest) -> dict[str, Any]:
    breaks = np.flatnonzero(np.diff(request.positions) != 1) + 1
    runs = np.split(request.positions, breaks)
    return {
        "tokens": request.tokens[: int(request.positions[-1]) + 1].tolist(),
        "ranges": [[int(run[0]), int(run[-1]) + 1] for run in runs],
        "temperature": request.temperature,
        "top_k": request.top_k,
    }


def _split(requests: Sequence[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
    """Split into HTTP requests within these limits; each has at least one."""
    part: list[ScoreRequest] = []
    tokens = numbers = 0
    for request in requests:
        answered = len(request.positions) * (1 + 2 * request.top_k)
        is_full = tokens + len(request.tokens) > MAX_TOKENS or numbers + answered > MAX_NUMBERS
        if part and (is_full or len(part) == MAX_SEQUENCES):
            yield part
            part, tokens, numbers = [], 0, 0
        part.append(request)
        tokens += len(request.tokens)
        numbers += answered
    if part:
        yield part


LogprobModel = TeacherProcess | RemoteTeacher


@dataclass(kw_only=True, eq=False)
class LogprobScorer(ModelScorer[LogprobModel]):
    """Scores sampled tokens by the logprobs of a model. Runs on the controller's event loop."""

    timeout_s: float
    token_scores_only = True

    def _to_scores(self, found: TokenLogprobs, rollout: Rollout) -> TokenScores:
        raise NotImplementedError

    async def _score(self, group: Group, requests: Sequence[ScoreRequest]) -> list[ScorerResult]:
        """`requests` has one request per rollout of the group."""
        longest = max(len(request.inputs) for request in requests)
        limit = self.model.max_context
        if limit is not None and longest > limit:
            raise ScoreError(
                f"Teacher {self.name!r} reads at most {limit} tokens, and group"
                f" {group.number} has {longest}; lower engine.max_context or"
                " sampling.max_new_tokens."
            )
        logprobs = await self.model.score(requests, timeout_s=self.timeout_s)
        scores = iter(
            [self._to_scores(*pair) for pair in zip(logprobs, group.rollouts, strict=True)]
        )
        return [
            ScorerResult(token_scores=tuple(islice(scores, len(episode.rollouts))))
            for episode in group.episodes
        ]
