"""A transformers classification model that says what the steps of a sequence are worth.

Promise: a value is what transformers computes for that sequence alone, whatever it is batched with;
where the model is a causal decoder, a sequence that grows is read on from where it was read last.

B = sequences of a batch, N = what is new to the model of one of them, D = hidden size, C = labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from millrace.core.errors import ConfigError
from millrace.models.continuing import GROWING_ATTENTION, States, run_on
from millrace.models.directory import LOADING_ERRORS, check_directory, first_line
from millrace.models.loading import without_progress_bars

Head = Literal["sequence", "token"]
_CLASSES: Mapping[Head, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
_PROBE_TOKENS = 6
# What forward passes raise that take other inputs, or keep their states in another way.
_RUNNING_ERRORS = (TypeError, AttributeError, ValueError, RuntimeError)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassifierInput:
    """What is to be read of a sequence, and where a value is wanted."""

    tokens: np.ndarray  # [L] int; the whole sequence
    ends: Sequence[int]  # last token of each step that is to be valued, ascending
    states: States | None = None  # of the tokens that have been read before
    keeps: bool = False  # will be read on

    @property
    def num_new(self) -> int:
        return len(self.tokens) - (self.states.length if self.states else 0)


class Classifier:
    """Used by one thread."""

    def __init__(self, model: PreTrainedModel, *, head: Head, label: int | None) -> None:
        """`label`: whose probability is the value, of a model that has several."""
        self.model = model
        self._of_rows: Any = getattr(model, "score", None)  # of a causal decoder: [D] -> [C]
        self._head: Head = head
        self._label = label
        self.reads_on = _reads_on(model, head)
        """A causal decoder with a head for each row: steps cost what their own tokens cost."""
        # Otherwise a passage has one end: what follows a step must not change what it is worth, so
        # its prefix is read as a sequence of its own.

    @torch.inference_mode()
    def read(self, passages: Sequence[ClassifierInput]) -> list[tuple[list[float], States | None]]:
        """For each passage a value per end, and what is kept of it."""
        if self.reads_on:
            return self._read_on(passages)
        logits_BC = self._prefix_logits([p.tokens[: p.ends[0] + 1] for p in passages])
        return [(self._values(logits_C[None]), None) for logits_C in logits_BC]

    def _read_on(
        self, passages: Sequence[ClassifierInput]
    ) -> list[tuple[list[float], States | None]]:
        hidden, kept = run_on(
            self.model.base_model,
            [passage.tokens for passage in passages],
            [passage.states for passage in passages],
            keeps=[passage.keeps for passage in passages],
        )
        values = []
        for hidden_ND, passage in zip(hidden, passages, strict=True):
            known = len(passage.tokens) - passage.num_new
            rows = torch.as_tensor([end - known for end in passage.ends], device=hidden_ND.device)
            values.append(self._values(self._of_rows(hidden_ND[rows])))
        return list(zip(values, kept, strict=True))

    def _prefix_logits(self, sequences: Sequence[np.ndarray]) -> Tensor:  # [B, C]
        longest = max(len(tokens) for tokens in sequences)
        padding = self.model.config.get_text_config().pad_token_id or 0
        ids = np.full((len(sequences), longest), padding, np.int64)
        seen = np.zeros_like(ids)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)], seen[row, : len(tokens)] = tokens, 1
        device = self.model.device
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(seen)}
        logits = self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits
        if self._head == "sequence":
            return logits
        lasts = torch.as_tensor([len(tokens) - 1 for tokens in sequences], device=device)
        return logits[torch.arange(len(sequences), device=device), lasts]

    def _values(self, logits: Tensor) -> list[float]:  # [ends, C]
        logits = logits.float()
        values = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        return values.tolist()


def load_classifier(
    path: str,
    *,
    head: Head,
    label: int | None,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> Classifier:
    check_directory(path, setting="the scorer's model")
    try:
        with without_progress_bars():
            model, info = _CLASSES[head].from_pretrained(
                path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    except LOADING_ERRORS as error:
        raise ConfigError(
            f"Reward model {path!r} cannot be loaded: {first_line(error)}."
        ) from error
    if missing := sorted(info["missing_keys"]):
        # transformers fills these with random numbers: a language model is no reward model.
        raise ConfigError(
            f"Reward model {path!r} lacks {missing[0]!r}, which a {head} classifier needs; choose"
            " a model that was trained as one."
        )
    return Classifier(model.to(device).eval(), head=head, label=label)


@torch.inference_mode()
def _reads_on(model: PreTrainedModel, head: Head) -> bool:
    """Whether the model computes the same when it is given a sequence in two parts and another one
    beside it, and its head at the last row is what it says itself. Then it will read like that."""
    of_rows = getattr(model, "score", None)
    if not isinstance(of_rows, nn.Linear):
        return False
    config = model.config.get_text_config()
    ids = [token for token in range(_PROBE_TOKENS + 1) if token != config.pad_token_id]
    tokens = np.array(ids[:_PROBE_TOKENS]) % config.vocab_size
    half = tokens[: _PROBE_TOKENS // 2]
    usual: Any = config._attn_implementation
    try:
        whole = model(input_ids=torch.from_numpy(tokens[None]).to(model.device)).logits[0]
        model.set_attn_implementation(GROWING_ATTENTION)
        _, (states,) = run_on(model.base_model, [half], [None], keeps=[True])
        sequences, before = [tokens[::-1], tokens], [None, states]
        (_, rest), _ = run_on(model.base_model, sequences, before, keeps=[False, True])
        in_parts = of_rows(rest[-1])
    except _RUNNING_ERRORS:
        model.set_attn_implementation(usual)
        return False
    said = (whole[-1] if head == "token" else whole).float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    scale = max(said.abs().max().item(), 1e-3)
    if (in_parts.float() - said).abs().max().item() <= tolerance * scale:
        return True
    model.set_attn_implementation(usual)
    return False
