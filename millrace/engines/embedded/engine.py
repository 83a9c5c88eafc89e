"""The embedded engine: continuous batching over a transformers model, one forward pass per step().

Promise: weights change only in swap(), which runs between two steps: no pass sees two versions, and
an engine whose swap failed half-way computes nothing until it holds a complete version. Every
sampled token comes with its logprob, the version that sampled it and, when truncation is on, the
ids it was kept from.

Synchronous; all methods are called by one thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.core.errors import RunFailed, TaskError, WeightError
from millrace.core.records import Completion, Finish, Request
from millrace.engines.embedded.blocks import BlockPool, BlockTables
from millrace.engines.embedded.kv_cache import KVCache
from millrace.engines.embedded.lanes import Lanes
from millrace.engines.embedded.paged_attention import measure_kv
from millrace.engines.embedded.runner import Runner
from millrace.engines.embedded.sampler import sample
from millrace.engines.embedded.scheduler import Scheduler
from millrace.engines.embedded.sequence import Sequence as Running
from millrace.engines.embedded.sequence import sequences_of
from millrace.engines.embedded.stopping import Stopping
from millrace.models.logprobs import KeptRows, final_logits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Finished:
    """All n completions of a request, in order."""

    id: str
    completions: list[Completion]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    running: int  # sequences with a lane
    waiting: int  # sequences without
    free_blocks: int
    generated_tokens: int  # since the start, as the two below
    prefill_tokens: int
    preemptions: int


class EmbeddedEngine:
    def __init__(
        self,
        model: PreTrainedModel,  # loaded with PAGED_ATTENTION
        tokenizer: PreTrainedTokenizerBase,
        *,
        version: int,  # of the weights the model holds
        eos_ids: Sequence[int],
        max_context: int,
        max_sequences: int,
        num_blocks: int,
        block_tokens: int,
        prefill_tokens: int,
        kv: Literal["keep", "recompute"] = "keep",
    ) -> None:
        # What a sequence alone could not store is beyond the context: so it always finishes.
        self._max_context = min(max_context, num_blocks * block_tokens)
        self._model = model.requires_grad_(False)
        self._parameters = dict(model.named_parameters())
        self._vocab_size = model.config.get_text_config().vocab_size
        self._version: int | None = version
        self._kv = kv
        self._stopping = Stopping(tokenizer, eos_ids=eos_ids)
        self._pool = BlockPool(num_blocks)
        self._lanes = Lanes(max_sequences, max_context=self._max_context)
        tables = BlockTables(
            self._pool,
            num_lanes=max_sequences,
            max_context=self._max_context,
            block_tokens=block_tokens,
        )
        cache = KVCache(
            measure_kv(model),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        self._scheduler = Scheduler(self._lanes, tables, prefill_tokens=prefill_tokens)
        self._runner = Runner(model, lanes=self._lanes, tables=tables, cache=cache)
        self._unfinished: dict[str, list[Completion | None]] = {}  # by request; None = not yet
        self._finished: list[Finished] = []  # not yet handed out
        self._num_arrived = 0
        self._num_generated = 0
        self._num_prefilled = 0

    @property
    def version(self) -> int | None:
        """The version it serves; None after a swap that failed half-way."""
        return self._version

    @property
    def has_work(self) -> bool:
        """True if step() would get anywhere."""
        return bool(self._finished) or (self._version is not None and self._scheduler.has_work)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=int(self._lanes.occupied.sum()),
            waiting=self._scheduler.num_waiting,
            free_blocks=self._pool.num_free,
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
            preemptions=self._scheduler.num_preemptions,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a swap must bring."""
        return {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}

    def submit(self, request: Request) -> None:
        """Queue a request; step() will return it. Raises TaskError if it can never be served."""
        self._check(request)
        sequences = sequences_of(request, first_arrival=self._num_arrived)
        self._num_arrived += request.n
        self._unfinished[request.id] = [None] * request.n
        if request.partial is not None and (finish := self._ended(sequences[0])) is not None:
            self._end(sequences[0], finish=finish)
            return
        self._scheduler.add(sequences)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One forward pass; returns the requests that are finished by it."""
        plan = self._scheduler.plan() if self._version is not None else None
        if plan is not None:
            hidden = self._runner.forward(plan)
            self._num_prefilled += int(plan.counts[plan.num_single :].sum())
            lanes, rows = self._scheduler.complete(plan)
            if len(lanes):
                self._sample(lanes, hidden=hidden, rows=rows)
                self._end_finished(lanes)
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Iterable[str]) -> list[Finished]:
        """End these requests with what they have; those that are not here are left out."""
        aborted = []
        for id in ids:
            for sequence in self._scheduler.remove(id):
                self._end(sequence, finish="abort")
            aborted += [finished for finished in self._finished if finished.id == id]
            self._finished = [finished for finished in self._finished if finished.id != id]
        return aborted

    @torch.inference_mode()
    def swap(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Take over new weights; what does not fit is refused before anything is touched."""
        self._check_weights(tensors, version=version)
        self._version = None
        try:
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])
        except RuntimeError as error:
            raise WeightError(
                f"Version {version} was applied only in part ({error}); the engine serves nothing"
                " until a complete version is in."
            ) from error
        self._version = version
        if self._kv == "recompute":
            self._scheduler.forget_kv()

    def _check_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        if missing := sorted(self._parameters.keys() - tensors.keys()):
            raise WeightError(f"Version {version} lacks {missing[0]!r} ({len(missing)} missing).")
        if unknown := sorted(tensors.keys() - self._parameters.keys()):
            raise WeightError(f"Version {version} has {unknown[0]!r}, which the model has not.")
        for name, parameter in self._parameters.items():
            if tensors[name].shape != parameter.shape:
                raise WeightError(
                    f"Version {version} has {name!r} as {tuple(tensors[name].shape)};"
                    f" the model's is {tuple(parameter.shape)}."
                )

    def _check(self, request: Request) -> None:
        """Refuse what can never be served, in one sentence."""
        num_prompt, sampling = len(request.prompt), request.sampling
        if request.id in self._unfinished:
            raise TaskError(f"Request {request.id!r} is already here; give each its own id.")
        if num_prompt == 0:
            raise TaskError(f"Request {request.id!r} has an empty prompt.")
        if num_prompt >= self._max_context:
            raise TaskError(
                f"The prompt of request {request.id!r} has {num_prompt} tokens, and the context of"
                f" {self._max_context} has no room for one more; shorten it or raise"
                " engine.max_context (and engine.num_blocks or engine.kv_bytes, if they bound it)."
            )
        if request.prompt.min() < 0 or request.prompt.max() >= self._vocab_size:
            raise TaskError(
                f"The prompt of request {request.id!r} has token ids outside"
                f" 0..{self._vocab_size - 1}; is its tokenizer the model's own?"
            )
        if request.n < 1 or sampling.max_new_tokens < 1 or "" in sampling.stop:
            raise TaskError(
                f"Request {request.id!r} needs n and max_new_tokens of at least 1, and no empty"
                f" stop string; it has {request.n}, {sampling.max_new_tokens}, {sampling.stop}."
            )
        if request.partial is not None:
            self._check_partial(request, request.partial)

    def _check_partial(self, request: Request, partial: Completion) -> None:
        if request.n != 1:
            raise TaskError(f"Request {request.id!r} resumes one completion but asks {request.n}.")
        if request.sampling.truncates != (partial.kept is not None) and len(partial.tokens):
            raise TaskError(
                f"Request {request.id!r} resumes a completion that was sampled with other"
                " truncation; resume it with the settings it began with."
            )

    def _sample(self, lanes: np.ndarray, *, hidden: Tensor, rows: np.ndarray) -> None:
        """Draw and record one token for each of `lanes`, from its row of hidden."""
        if len(rows) != len(hidden) or (rows[1:] != rows[:-1] + 1).any():
            hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        logits = final_logits(self._model, hidden)
        drawn = sample(
            logits,
            self._lanes.sampling_rows(lanes, vocab_size=logits.shape[1], device=logits.device),
        )
        logprobs = drawn.logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise RunFailed(
                f"Version {self._version} of the weights gives logits that are not finite;"
                " lower trainer.learning_rate."
            )
        assert self._version is not None
        tokens = drawn.tokens.cpu().numpy()
        self._lanes.append(lanes, tokens=tokens, logprobs=logprobs, version=self._version)
        self._num_generated += len(lanes)
        if drawn.kept is not None:
            self._record_kept(lanes, drawn.kept)

    def _record_kept(self, lanes: np.ndarray, kept: KeptRows) -> None:
        ids, offsets = kept.ids.to(torch.int32).cpu().numpy(), kept.offsets.tolist()
        for row in np.flatnonzero(self._lanes.truncates[lanes]):
            own = ids[offsets[row] : offsets[row + 1]]
            # A copy: a view would keep the ids of the whole batch alive.
            self._lanes.sequence(lanes[row]).kept.append(own.copy())

    def _end_finished(self, lanes: np.ndarray) -> None:
        """End the sequences in these lanes whose newest token was their last."""
        num_tokens = self._lanes.num_tokens[lanes]
        stopped = self._stopping.is_eos(self._lanes.tokens[lanes, num_tokens - 1])
        for row in np.flatnonzero(self._lanes.has_stop_strings[lanes] & ~stopped):
            lane = lanes[row]
            sampled = self._lanes.tokens[lane, self._lanes.num_prompt[lane] : num_tokens[row]]
            stop = self._lanes.sequence(lane).request.sampling.stop
            stopped[row] = self._stopping.ends_in_stop_string(sampled, stop)
        ended = stopped | (num_tokens >= self._lanes.limits[lanes])
        for row in np.flatnonzero(ended):
            sequence = self._lanes.sequence(lanes[row])
            self._scheduler.finish(sequence)
            self._end(sequence, finish="stop" if stopped[row] else "length")

    def _ended(self, sequence: Running) -> Finish | None:
        """How a resumed completion had ended already, if it had."""
        sampled, sampling = sequence.tokens[sequence.num_prompt :], sequence.request.sampling
        if len(sampled) and self._stopping.is_eos(sampled[-1:])[0]:
            return "stop"
        if sampling.stop and self._stopping.ends_in_stop_string(sampled, sampling.stop):
            return "stop"
        at_limit = len(sampled) >= sampling.max_new_tokens
        return "length" if at_limit or len(sequence.tokens) >= self._max_context else None

    def _end(self, sequence: Running, *, finish: Finish) -> None:
        """Record a completion; with the last of its request, the request is finished."""
        id, sampled = sequence.request.id, sequence.tokens[sequence.num_prompt :]
        text = self._stopping.text(sampled, sequence.request.sampling.stop)
        completions = self._unfinished[id]
        completions[sequence.member] = sequence.completion(finish=finish, text=text)
        done = [completion for completion in completions if completion is not None]
        if len(done) == len(completions):
            del self._unfinished[id]
            self._finished.append(Finished(id=id, completions=done))
