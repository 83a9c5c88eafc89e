"""Reward models: transformers classifiers that value the steps of a sequence.

Promise: a value is what transformers computes for that sequence alone, whatever it is batched with.
With a causal decoder, a sequence that grows is processed incrementally: the new tokens of all
sequences are laid end to end, without padding. Cached keys and values are never copied for a pass:
each sequence has a buffer of its own, to which new ones are appended.

B = sequences of a batch, N = new tokens of one of them, T = those of all, D = hidden size,
C = labels, H = heads, E = head size.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from millrace.models.attention.layout import Block, ScoreRules
from millrace.models.attention.packed import attend
from millrace.models.loading import load_pretrained
from millrace.models.support import RUNNING_ERRORS, is_close, register_attention

Head = Literal["sequence", "token"]
_CLASSES: Mapping[Head, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
_PROBE_TOKENS = 6
INCREMENTAL_ATTENTION = "millrace_incremental"
_FIRST_CAPACITY = 64  # tokens of a new buffer; it doubles when it is full


class SequenceKv:
    """Keys and values of the tokens of one sequence, by layer. Used by one pass at a time."""

    def __init__(self) -> None:
        self.length = 0  # tokens that all layers have processed
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; [H, capacity, E] each

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a layer's new tokens, [H, new, E]; returns all of them."""
        end = self.length + key.shape[1]
        buffers = self._buffers.get(layer)
        if buffers is None or end > buffers[0].shape[1]:
            capacity = max(_FIRST_CAPACITY, 2 * end)
            larger = tuple(x.new_empty(x.shape[0], capacity, x.shape[2]) for x in (key, value))
            for new, old in zip(larger, buffers or (), strict=False):
                new[:, : self.length] = old[:, : self.length]
            buffers = self._buffers[layer] = (larger[0], larger[1])
        keys, values = buffers
        keys[:, self.length : end], values[:, self.length : end] = key, value
        return keys[:, :end], values[:, :end]


class SequenceKvCache:
    """An LRU cache of SequenceKv by their tokens, of at most max_tokens. Used by one thread."""

    def __init__(self, *, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._entries: OrderedDict[bytes, SequenceKv] = OrderedDict()

    def put(self, tokens: np.ndarray, kv: SequenceKv) -> None:
        self.take(tokens)
        self._entries[_key(tokens)] = kv
        self.num_tokens += kv.length
        while self.num_tokens > self._max_tokens:
            _, dropped = self._entries.popitem(last=False)
            self.num_tokens -= dropped.length

    def take(self, tokens: np.ndarray) -> SequenceKv | None:
        """Remove and return the entry of exactly these tokens."""
        kv = self._entries.pop(_key(tokens), None)
        self.num_tokens -= kv.length if kv else 0
        return kv


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassifierInput:
    """A sequence, and the tokens at which its value is wanted."""

    tokens: np.ndarray  # [L] int; the whole sequence
    ends: Sequence[int]  # last token of each step to value, ascending
    past: SequenceKv | None = None  # of the tokens that were processed before
    keep: bool = False  # the sequence will grow, so return its keys and values

    @property
    def num_new(self) -> int:
        return len(self.tokens) - (self.past.length if self.past else 0)


def forward_incremental(
    backbone: nn.Module,
    inputs: Sequence[ClassifierInput],
    *,
    windows: set[int | None] | None = None,
) -> tuple[list[Tensor], list[SequenceKv | None]]:
    """Hidden states [new, D] of the new tokens of each input, and the keys and values of those that
    are kept. The backbone's attention is INCREMENTAL_ATTENTION. The windows that attention was
    called with are added to `windows`."""
    device = next(backbone.parameters()).device
    caches = [one.past or (SequenceKv() if one.keep else None) for one in inputs]
    counts = [one.num_new for one in inputs]
    new = [one.tokens[len(one.tokens) - one.num_new :] for one in inputs]
    positions = [np.arange(len(one.tokens) - one.num_new, len(one.tokens)) for one in inputs]
    output = backbone(
        input_ids=torch.from_numpy(np.concatenate(new).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(np.concatenate(positions))[None].to(device),
        use_cache=False,
        incremental=list(zip(caches, counts, strict=True)),
        **({} if windows is None else {"windows": windows}),
    )
    for kv, count in zip(caches, counts, strict=True):
        if kv is not None:
            kv.length += count
    kept = [kv if one.keep else None for kv, one in zip(caches, inputs, strict=True)]
    return list(output.last_hidden_state[0].split(counts)), kept


def incremental_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, E]
    key: Tensor,  # [1, H_kv, T, E]
    value: Tensor,  # [1, H_kv, T, E_v]
    attention_mask: Tensor | None,
    *,
    incremental: Sequence[tuple[SequenceKv | None, int]],  # cache and new tokens per sequence
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    windows: set[int | None] | None = None,  # collects those of the layers
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns [1, T, H, E_v]."""
    layer: Any = module.layer_idx
    if windows is not None:
        windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rules = ScoreRules(scale, sliding_window, softcap)
    ends = itertools.accumulate(count for _, count in incremental)
    parts = []
    for (kv, count), end in zip(incremental, ends, strict=True):
        q, k, v = (x[0, :, end - count : end] for x in (query, key, value))
        if kv is not None:
            k, v = kv.append(layer, k, v)
        block = Block(shape=(1, count, k.shape[1]))
        parts.append(attend(q[None], k[None], v[None], block=block, rules=rules)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).data, digest_size=16).digest()


register_attention(INCREMENTAL_ATTENTION, incremental_attention)


class Classifier:
    """Used by one thread."""

    def __init__(self, model: PreTrainedModel, *, head: Head, label: int | None) -> None:
        """`label`: the label whose probability is the value; None = the only logit is."""
        self.model = model
        self._score: Any = getattr(model, "score", None)  # head of a causal decoder: [D] -> [C]
        self._head: Head = head
        self._label = label
        self.is_incremental = _is_incremental(model, head)
        """Whether the model is a causal decoder with a head per row, so that each token is computed
        once. Otherwise an input has one end, and its prefix is computed as a sequence of its own:
        tokens after a step must not change the value of the step."""

    @torch.inference_mode()
    def values(
        self, inputs: Sequence[ClassifierInput]
    ) -> list[tuple[list[float], SequenceKv | None]]:
        """Returns, for each input, a value per end, and its keys and values if they are kept."""
        if not self.is_incremental:
            logits_BC = self._prefix_logits([one.tokens[: one.ends[0] + 1] for one in inputs])
            return [(self._values(logits_C[None]), None) for logits_C in logits_BC]
        hidden, kept = forward_incremental(self.model.base_model, inputs)
        values = []
        for hidden_ND, one in zip(hidden, inputs, strict=True):
            rows = torch.as_tensor([end - len(one.tokens) for end in one.ends])  # from the end
            values.append(self._values(self._score(hidden_ND[rows.to(hidden_ND.device)])))
        return list(zip(values, kept, strict=True))

    def _prefix_logits(self, sequences: Sequence[np.ndarray]) -> Tensor:  # [B, C]
        device = self.model.device
        rows = [torch.from_numpy(tokens.astype(np.int64)) for tokens in sequences]
        padding = self.model.config.get_text_config().pad_token_id or 0
        ids = pad_sequence(rows, batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
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
    model = load_pretrained(
        _CLASSES[head],
        path,
        setting="the scorer's model",
        remedy=f"choose a model that was trained as a {head} classifier",
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    return Classifier(model.to(device).eval(), head=head, label=label)


@torch.inference_mode()
def _is_incremental(model: PreTrainedModel, head: Head) -> bool:
    """Whether the model computes the same logits for a sequence in two parts beside another one. If
    so, its attention is left at INCREMENTAL_ATTENTION."""
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        return False
    config = model.config.get_text_config()
    ids = [token for token in range(_PROBE_TOKENS + 1) if token != config.pad_token_id]
    tokens = np.array(ids[:_PROBE_TOKENS]) % config.vocab_size
    half = tokens[: _PROBE_TOKENS // 2]
    original: Any = config._attn_implementation
    try:
        whole = model(input_ids=torch.from_numpy(tokens[None]).to(model.device)).logits[0]
        model.set_attn_implementation(INCREMENTAL_ATTENTION)
        first = ClassifierInput(tokens=half, ends=(), keep=True)
        _, (kv,) = forward_incremental(model.base_model, [first])
        other = ClassifierInput(tokens=tokens[::-1], ends=())
        rest = ClassifierInput(tokens=tokens, ends=(), past=kv)
        windows: set[int | None] = set()
        (_, hidden), _ = forward_incremental(model.base_model, [other, rest], windows=windows)
        in_parts = score(hidden[-1])
        expected = whole[-1] if head == "token" else whole
        is_same = is_close(in_parts, expected, dtype=model.dtype, min_scale=1e-3)
        # These few tokens do not reach the end of a window that only the mask knows (PhiMoE).
        if is_same and not (_has_window(config) and windows == {None}):
            return True
    except RUNNING_ERRORS:
        pass  # it takes other inputs, or caches its keys in another way
    model.set_attn_implementation(original)
    return False


def _has_window(config: Any) -> bool:
    """Whether layers of a model with this text configuration attend to a window of the context."""
    kinds = getattr(config, "layer_types", None)
    is_used = not kinds or "sliding_attention" in kinds
    return is_used and getattr(config, "sliding_window", None) is not None
