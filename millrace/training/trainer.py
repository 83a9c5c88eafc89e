"""The learner: one batch, one step, one version.

Promise: trainer logprobs are those of the distribution each token was drawn from (its temperature,
its kept ids). A step applies a finite gradient, or raises and leaves the weights as they were.

Master weights and optimizer state are float32; bfloat16 is used for computing only. The model stays
in eval mode: dropout would make the trainer's distribution another one than the engine's.
Used by one thread. T = tokens of a microbatch, N = trained tokens of it, D = hidden size.
"""

import functools
import math
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.core.errors import CheckpointError, RunFailed
from millrace.core.microbatch import Batch, Microbatch
from millrace.models.loading import hidden_states, without_progress_bars
from millrace.models.logprobs import KeptRows, chunked_token_logprobs
from millrace.models.packed_attention import PackedLayout
from millrace.training.losses import Loss, TokenBatch
from millrace.training.metrics import StepMetrics
from millrace.training.optimizer import Schedule, build_optimizer

STATE_FILE = "trainer_state.pt"


class Trainer:
    """`model` is float32 and was loaded with PACKED_ATTENTION."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: Loss,
        schedule: Schedule,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        logprob_chunk: int = 1024,
        gradient_checkpointing: bool = False,
    ) -> None:
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        self.model = model
        self.steps_done = 0  # = the Version of the weights
        self._loss = loss
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._compute_dtype = compute_dtype
        self._logprob_chunk = logprob_chunk
        self._optimizer = build_optimizer(model, betas=betas, weight_decay=weight_decay)
        if gradient_checkpointing:
            _checkpoint_layers(model)

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer update; returns its metrics."""
        assert batch.num_trained_tokens > 0, "a batch without trained tokens is no batch"
        self._optimizer.zero_grad(set_to_none=True)
        metrics = StepMetrics()
        for microbatch in batch.microbatches:
            if not microbatch.mask.any():
                continue
            tokens = self._token_batch(microbatch, batch)
            loss, named = self._loss(tokens)
            loss.backward()
            metrics.add(tokens, loss=loss.detach(), named=named)
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), max_norm=self._max_grad_norm
        ).item()
        summary = metrics.summary()
        self._check_finite(loss=summary["loss"], grad_norm=grad_norm)
        learning_rate = self._schedule.at(self.steps_done)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.steps_done += 1
        return {**summary, "grad_norm": grad_norm, "learning_rate": learning_rate}

    def token_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Trainer logprobs and entropies [N] of the trained tokens, in order; differentiable."""
        device = self.model.device
        trained = np.flatnonzero(microbatch.mask)
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=self._compute_dtype is torch.bfloat16
        ):
            hidden = hidden_states(
                self.model,
                input_ids=_tensor(microbatch.tokens, np.int64, device)[None],
                position_ids=_tensor(microbatch.positions, np.int64, device)[None],
                layout=PackedLayout.of(microbatch.lengths, device=device),
            )  # [T, D]
            kept = microbatch.kept
            return chunked_token_logprobs(
                self.model,
                # Token t was drawn from what the model says at t - 1.
                hidden.index_select(0, _tensor(trained - 1, np.int64, device)),
                _tensor(microbatch.tokens[trained], np.int64, device),
                temperatures=_tensor(microbatch.temperatures[trained], np.float32, device),
                kept=None if kept is None else KeptRows.select(kept, rows=trained, device=device),
                chunk=self._logprob_chunk,
            )

    def named_weights(self) -> dict[str, Tensor]:
        """Every parameter once, by name; tied ones under the first of their names."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory, and beside it what a resumed run needs."""
        with without_progress_bars():
            self.model.save_pretrained(folder)
        random = {"cpu": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.model.device)
        state = {
            "steps_done": self.steps_done,
            "optimizer": self._optimizer.state_dict(),
            "random": random,
        }
        # To a file object: given a path, torch.save loses the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Go on where save() was called; the model was loaded from the same folder."""
        try:
            state: dict[str, Any] = torch.load(
                folder / STATE_FILE, map_location="cpu", weights_only=True
            )
            self._optimizer.load_state_dict(state["optimizer"])
            self.steps_done = state["steps_done"]
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"The trainer state in {str(folder)!r} cannot be read ({type(error).__name__});"
                " remove that checkpoint to resume from the one before it."
            ) from error
        torch.set_rng_state(state["random"]["cpu"])
        if self.model.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.model.device)

    def state_bytes(self) -> int:
        """About what save() writes: the weights, and the optimizer's two moments of each."""
        return 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _token_batch(self, microbatch: Microbatch, batch: Batch) -> TokenBatch:
        device = self.model.device
        trained = np.flatnonzero(microbatch.mask)
        logprobs, entropies = self.token_logprobs(microbatch)
        sequences = np.repeat(np.arange(len(microbatch.lengths)), microbatch.lengths)
        staleness = self.steps_done - microbatch.versions[trained]
        return TokenBatch(
            trainer_logprobs=logprobs,
            engine_logprobs=_tensor(microbatch.engine_logprobs[trained], np.float32, device),
            entropies=entropies,
            advantages=_tensor(microbatch.advantages[trained], np.float32, device),
            staleness=_tensor(staleness, np.int64, device),
            sequence_ids=_tensor(sequences[trained], np.int64, device),
            num_trained_tokens=batch.num_trained_tokens,
            num_sequences=batch.num_sequences,
        )

    def _check_finite(self, *, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunFailed(
                f"Step {self.steps_done + 1} has loss {loss:g} and gradient norm {grad_norm:g},"
                " and was not applied; lower trainer.learning_rate or set trainer.dtype to float32."
            )


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of each layer for the backward pass, and compute the rest again.

    transformers' own switch works in train mode only, and the model stays in eval mode.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def _tensor(array: np.ndarray, dtype: Any, device: torch.device) -> Tensor:
    """A copy: arrays from the wire are read-only views of a receive buffer."""
    return torch.from_numpy(array.astype(dtype)).to(device, non_blocking=True)
