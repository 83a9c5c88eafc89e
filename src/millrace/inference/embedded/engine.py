"""The embedded engine: continuous batching over a transformers model. Each step() is one forward
pass, or one round of them.

Promise: weights change only in commit(), which runs between two steps: no pass sees two versions,
and an engine whose commit failed half-way computes nothing until it holds a complete version. Every
sampled token comes with its logprob, the version that sampled it, when truncation is on the ids it
was kept from and, of a mixture of experts whose routing it is given, the experts it went to.

Synchronous; all methods are called by one thread, but prepare(), which another may call meanwhile.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.core.errors import RunFailed, TaskError
from millrace.core.records import Completion, CompletionChunk, Finish, Request, Sampling
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.inference.backend import EngineStats, FinishedRequest
from millrace.inference.embedded.decode.loop import DecodeLoop
from millrace.inference.embedded.decode.sampling import KEPT_CAPACITY, sample_rows
from millrace.inference.embedded.decode.state import NOTHING
from millrace.inference.embedded.live_weights import LiveWeights, PreparedWeights
from millrace.inference.embedded.lora.merging import AdapterMerger
from millrace.inference.embedded.parts import make_parts
from millrace.inference.embedded.sampling.sampler import sample
from millrace.inference.embedded.scheduling.batch_slots import guided
from millrace.inference.embedded.scheduling.endings import Endings
from millrace.inference.embedded.scheduling.intake import adapter_slot, check_request
from millrace.inference.embedded.scheduling.outputs import Outcomes, Streams
from millrace.inference.embedded.scheduling.sequence import BatchPlan, sequences_of
from millrace.inference.embedded.scheduling.stopping import Stopping
from millrace.inference.embedded.scoring import ScoringEngine, num_rows
from millrace.models.grammars import GrammarCompiler
from millrace.models.logprobs import final_logits
from millrace.models.lora.factors import Adapter
from millrace.models.moe.routing import Routing


class EmbeddedEngine:
    def __init__(
        self,
        model: PreTrainedModel,  # loaded with PAGED_ATTENTION
        tokenizer: PreTrainedTokenizerBase,
        *,
        version: int,  # of the weights the model holds
        # Of this model. With a merger, or an adapter under None, swaps bring adapters.
        merger: AdapterMerger | None = None,
        adapters: Mapping[str | None, Adapter] | None = None,  # not merged; by name in requests
        routing: Routing | None = None,  # of this model, to note where tokens go
        eos_ids: Sequence[int],
        max_context: int,
        max_sequences: int,
        num_blocks: int,
        block_tokens: int,
        prefill_tokens: int,
        kv: Literal["keep", "recompute"] = "keep",
        prefix_cache: bool = True,
        round_steps: int = 1,  # tokens of each sequence per round trip to the device
        kept_capacity: int = KEPT_CAPACITY,
        compile_layers: bool = False,
    ) -> None:
        # What a sequence alone could not store is beyond the context: so it always finishes.
        self._max_context = min(max_context, num_blocks * block_tokens)
        self._model = model.requires_grad_(False)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._kv = kv
        parts = make_parts(
            model,
            version=version,
            adapters=adapters,
            routing=routing,
            eos_ids=eos_ids,
            max_context=self._max_context,
            max_sequences=max_sequences,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            prefill_tokens=prefill_tokens,
            keeps_kv=kv == "keep",
            prefix_cache=prefix_cache,
            round_steps=round_steps,
            kept_capacity=kept_capacity,
            compile_layers=compile_layers,
        )
        self._pool, self._lanes, self._scheduler = parts.pool, parts.lanes, parts.scheduler
        self._bank, self._runner, self._rounds = parts.bank, parts.runner, parts.rounds
        self._routes = parts.routes
        self._scorer = ScoringEngine(model)
        self._weights = LiveWeights(model, version=version, merger=merger, bank=self._bank)
        self._must_step_singly = False  # a round had no room for what truncation kept
        self._has_new = False  # requests came since the last round
        self._grammars = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, eos_ids=eos_ids)
        stopping = Stopping(tokenizer, eos_ids=eos_ids)
        self._endings = Endings(self._lanes, stopping)
        self._outcomes = Outcomes(stopping, block_tokens=block_tokens)
        self._streams = Streams(self._lanes)
        self._num_arrived = 0
        self._num_generated = 0
        self._num_prefilled = 0

    @property
    def version(self) -> int | None:
        """The version it serves; None after a commit that failed half-way."""
        return self._weights.version

    @property
    def has_work(self) -> bool:
        """True if step() would get anywhere."""
        can_compute = self.version is not None and self._scheduler.has_work
        return can_compute or self._outcomes.has_any

    @property
    def has_held(self) -> bool:
        """True if sequences wait only because hold_new() was called."""
        return self._scheduler.num_held_back > 0

    @property
    def has_room(self) -> bool:
        """True if another sequence would get a lane."""
        return self._lanes.num_free > 0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=int(self._lanes.occupied.sum()),
            waiting=self._scheduler.num_waiting + self._scheduler.num_held_back,
            free_blocks=self._pool.num_free,
            generated_tokens=self._num_generated,
            prefill_tokens=self._num_prefilled,
            cached_tokens=self._scheduler.num_cached_tokens,
            preemptions=self._scheduler.num_preemptions,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a swap must bring."""
        return self._weights.shapes

    def add_request(
        self, request: Request, *, stream: bool = False, per_completion: bool = False
    ) -> None:
        """See EngineCore.add_request()."""
        if request.id in self._outcomes:
            raise TaskError(f"Request {request.id!r} is already here; give each its own id.")
        check_request(request, max_context=self._max_context, vocab_size=self._vocab_size)
        slot = adapter_slot(request, self._bank)
        sequences = sequences_of(
            request,
            first_arrival=self._num_arrived,
            adapter_slot=slot,
            guide=self._grammars.matcher(request.sampling.grammar),
            records_routes=self._routes is not None,
        )
        self._num_arrived += request.n
        self._outcomes.expect(request, per_completion=per_completion)
        if stream:
            self._streams.open(sequences)
        if request.partial is not None:
            finish = self._endings.of_resumed(sequences[0])
            if finish is not None:
                self._outcomes.end(sequences[0], finish=finish)
                return
        self._scheduler.add(sequences)
        self._has_new = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Prepare everything that would make the first tokens late."""
        if self._rounds is None:
            return
        self._rounds.warm_up()
        # Two prompts of different lengths, to have the prefill pass compiled for any, and of
        # different tokens, lest the second be found in the prefix cache.
        for token, length in enumerate((24, 16)):
            prompt = np.full(min(length, self._max_context - 1), token, dtype=np.int32)
            sampling = Sampling(max_new_tokens=1)
            self.add_request(Request(id="warm-up", prompt=prompt, sampling=sampling))
            while self.has_work:
                self.step()
        self._num_generated = self._num_prefilled = 0

    @torch.inference_mode()
    def step(self, *, should_stop: Callable[[], bool] = lambda: False) -> list[FinishedRequest]:
        """One forward pass, or a round of them; returns the requests that are finished by it.

        What a round finishes is returned by the next step, which makes records of it while the
        device works. A round ends early when should_stop() says so: something waits for its end.
        """
        if self.version is not None:
            if self._rounds is None or self._must_step_singly or self._lanes.any_guided:
                self._must_step_singly = False
                self._pass(self._scheduler.plan())
            else:
                self._pass(self._scheduler.plan_prefill())
                if not self._lanes.any_guided:  # the host has a say in each of their tokens
                    self._round(self._rounds, should_stop=should_stop)
        if not self._scheduler.has_work:
            self._record_ended()
        return self._outcomes.take()

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenLogprobs]:
        """Score given tokens with the served version, in one forward pass between two steps."""
        if self._bank is not None:
            rows = torch.full((num_rows(requests),), self._bank.slot_of(None))
            self._bank.choose(rows.to(self._model.device))
        if self._routes is not None:
            self._routes.look_away(num_rows(requests))
        (logprobs,) = self._scorer.score([requests], version=self.version)
        return logprobs

    def take_chunks(self) -> dict[str, list[CompletionChunk]]:
        """See EngineCore.take_chunks()."""
        return self._streams.take()

    def take_coalesced_chunks(self) -> dict[str, list[CompletionChunk]]:
        """See EngineCore.take_coalesced_chunks()."""
        return self._streams.take_at_leisure()

    def take_completions(self) -> dict[str, dict[int, Completion]]:
        """See EngineCore.take_completions()."""
        return self._outcomes.take_singles()

    def abort(self, ids: Iterable[str], *, finish: Finish = "abort") -> list[FinishedRequest]:
        """End these requests with what they have; those that are not here are left out."""
        aborted = []
        self._record_ended()
        for id in ids:
            for sequence in self._scheduler.remove(id):
                self._outcomes.end(sequence, finish=finish)
            aborted += self._outcomes.take_one(id)
        return aborted

    def interrupt(self) -> list[FinishedRequest]:
        """End the requests that have a lane, to be resumed here or elsewhere; the KV of others is
        forgotten."""
        running = dict.fromkeys(sequence.request.id for sequence in self._lanes.running())
        interrupted = self.abort(running, finish="interrupt")
        self._scheduler.forget_kv()
        return interrupted

    def expire(self, before: int) -> list[FinishedRequest]:
        """End the requests that expire and hold a token of an older version than `before`; so will
        those that come later with such tokens."""
        self._endings.expire(before)
        self._record_ended()
        versions: dict[str, list[np.ndarray]] = {}
        for sequence in self._scheduler.sequences():
            if sequence.request.expires:
                _, _, own = self._lanes.sampled_by(sequence)
                versions.setdefault(sequence.request.id, []).append(own)
        for id, known in versions.items():
            known += self._outcomes.versions_of(id)
        old = [id for id, known in versions.items() if (np.concatenate(known) < before).any()]
        return self.abort(old, finish="expire")

    def preempt_all(self) -> list[FinishedRequest]:
        """Have all sequences wait, with their KV if it is kept across swaps; returns the requests
        that are finished already."""
        self._record_ended()
        if self._kv == "keep":
            self._scheduler.preempt_all()
        else:
            self._scheduler.forget_kv()
        return self._outcomes.take()

    def hold_new(self) -> None:
        """Begin no sequence until seat_new(); go on with the others."""
        self._scheduler.hold_new()

    def release_new(self) -> None:
        self._scheduler.release_new()

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, Tensor], *, version: int) -> PreparedWeights:
        """Make new weights ready for commit(), beside decoding; what does not fit is refused.

        The tensors are complete, and stay as they are until the commit.
        """
        return self._weights.prepare(tensors, version=version)

    @torch.inference_mode()
    def commit(self, prepared: PreparedWeights) -> None:
        """Take over new weights. Decoding waits for this."""
        self._weights.commit(prepared)
        if self._kv == "recompute":
            self._scheduler.forget_kv()
        self._scheduler.begin(prepared.version)

    def swap(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """prepare() and commit() at once, for callers without a thread for the one."""
        if self._model.device.type == "cuda":
            # What this thread has queued may be what makes the tensors complete.
            torch.cuda.current_stream(self._model.device).synchronize()
        self.commit(self.prepare(tensors, version=version))

    def _pass(self, plan: BatchPlan | None) -> None:
        if plan is None:
            return
        try:
            hidden = self._runner.forward(plan)
        except torch.OutOfMemoryError:
            # Nothing was noted of the pass: it is planned again, smaller.
            self._make_room(plan)
            return
        self._num_prefilled += int(plan.counts[plan.num_single :].sum())
        lanes, rows = self._scheduler.complete(plan)
        if len(lanes):
            self._sample(lanes, hidden=hidden, rows=rows)
            self._end_finished(lanes)

    def _make_room(self, plan: BatchPlan) -> None:
        if not self._scheduler.shrink_prefill():
            raise RunFailed(
                f"A forward pass over {int(plan.counts.sum())} tokens does not fit into the memory"
                f" of {self._model.device}; lower engine.kv_bytes or engine.max_sequences."
            ) from None
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _round(self, rounds: DecodeLoop, *, should_stop: Callable[[], bool]) -> None:
        plan = self._scheduler.plan_round(max_steps=self._round_steps(rounds))
        if plan is None:
            return
        result = rounds.run(plan, should_stop=should_stop, meanwhile=self._record_ended)
        self._check_finite(result.logprobs[result.tokens != NOTHING])
        counts = self._endings.until_stop_string(plan.lanes, result)
        assert self.version is not None
        self._lanes.append_round(
            plan.lanes,
            tokens=result.tokens,
            logprobs=result.logprobs,
            counts=counts,
            version=self.version,
        )
        self._num_generated += int(counts.sum())
        if result.kept is not None:
            assert result.num_kept is not None
            self._lanes.keep_round(
                plan.lanes, ids=result.kept, num_kept=result.num_kept, counts=counts
            )
        self._end_finished(plan.lanes[counts > 0], later=True)
        idle = counts < len(result.tokens)
        self._must_step_singly = bool(self._lanes.occupied[plan.lanes[idle]].any())

    def _round_steps(self, rounds: DecodeLoop) -> int:
        """Shorter rounds while requests come in, and more so while sequences wait for a lane: what
        falls free within a round stays empty until its end."""
        share = 4 if self._scheduler.num_waiting else 2 if self._has_new else 1
        self._has_new = False
        return max(1, rounds.max_steps // share)

    def _record_ended(self) -> None:
        self._outcomes.record()
        self._scheduler.settle()

    def _check_finite(self, logprobs: np.ndarray) -> None:
        if not np.isfinite(logprobs).all():
            raise RunFailed(
                f"Version {self.version} of the weights gives logits that are not finite;"
                " lower optimizer.learning_rate."
            )

    def _sample(self, lanes: np.ndarray, *, hidden: Tensor, rows: np.ndarray) -> None:
        """Draw and record one token for each of `lanes`, from its row of hidden."""
        if len(rows) != len(hidden) or (rows[1:] != rows[:-1] + 1).any():
            hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        logits = final_logits(self._model, hidden.to(self._model.dtype))
        how = self._lanes.sampling_rows(lanes, vocab_size=logits.shape[1], device=logits.device)
        if self._lanes.is_guided[lanes].any():
            drawn = sample(guided(logits, self._lanes, lanes), how)
        else:
            drawn = sample_rows(logits, how)
        logprobs = drawn.logprobs.cpu().numpy()
        self._check_finite(logprobs)
        assert self.version is not None
        tokens = drawn.tokens.cpu().numpy()
        self._lanes.append(lanes, tokens=tokens, logprobs=logprobs, version=self.version)
        self._num_generated += len(lanes)
        if drawn.kept is not None:
            ids = drawn.kept.ids.to(torch.int32).cpu().numpy()
            self._lanes.keep(lanes, ids=ids, offsets=drawn.kept.offsets.tolist())

    def _end_finished(self, lanes: np.ndarray, *, later: bool = False) -> None:
        """End the sequences in these lanes whose newest token was their last; their lanes fall
        free now, their records are made now or `later`."""
        for sequence, finish in self._endings.among(lanes):
            self._scheduler.finish(sequence)
            self._outcomes.note(sequence, finish=finish)
        if not later:
            self._record_ended()
