"""Checks at load that Millrace reproduces what transformers computes for an architecture.

The model is run once on a few tokens with an attention in which each token attends only to itself.
Three things are checked.
- final_logits turns its hidden states into its logits.
- No token influences another one. Recurrent state or convolutions outside the attention function
  would cross sequences in a packed or paged forward pass.
- Millrace's attention supports every argument that the model passes to its attention function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from millrace.core.errors import ConfigError
from millrace.models.logprobs import final_logits
from millrace.models.sharding import inside

PROBE_ATTENTION = "millrace_probe"
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "indices", "block_indices")
_PROBE_TOKENS = 4
# What forward passes raise that take other inputs, or have an attention or cache of their own.
RUNNING_ERRORS = (TypeError, AttributeError, ValueError, RuntimeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """The arguments of the attention function, layer by layer."""

    obstacles: list[str] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)


def check_supported(model: PreTrainedModel, *, path: str) -> None:
    """Refuse a model (loaded with PROBE_ATTENTION) whose logits Millrace would not reproduce."""
    try:
        with torch.no_grad():
            obstacle = _obstacle(model)
    except RUNNING_ERRORS as error:
        obstacle = f"it does not run as a causal language model does ({error})"
    if obstacle is not None:
        raise ConfigError(
            f"Model {path!r} ({type(model).__name__}) is not supported: {obstacle};"
            " use a decoder-only transformer such as Llama, Qwen or Gemma."
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    if model.get_output_embeddings() is None:
        return "it has no language-model head"
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    if unknown := sorted(set(layers) - _SUPPORTED_LAYERS):
        return f"it has layers of type {unknown[0]!r}"
    probe = _Probe()
    # Two packed copies of one sequence that differ in their first token.
    copy = torch.arange(_PROBE_TOKENS, device=model.device) % config.vocab_size
    tokens = torch.cat([copy, copy])
    tokens[_PROBE_TOKENS] = config.vocab_size - 1
    positions = torch.arange(_PROBE_TOKENS, device=model.device).repeat(2)
    inputs = {"input_ids": tokens[None], "position_ids": positions[None]}

    def compute() -> tuple[Tensor, Tensor]:
        output = model.base_model(**inputs, use_cache=False, millrace_probe=probe)
        hidden = output.last_hidden_state[0]
        return hidden, final_logits(model, hidden)

    hidden, logits = inside(model, compute)
    if not probe.windows:
        return (
            "its attention does not go through transformers' AttentionInterface with all arguments"
        )
    if probe.obstacles:
        return probe.obstacles[0]
    if "sliding_attention" in layers and not any(probe.windows):
        return "it does not pass the sliding window to its attention function"
    expected = model(**inputs, use_cache=False, millrace_probe=_Probe()).logits[0]
    # A sharded model may compute in 16 bits although its weights are float32.
    dtype = expected.dtype if model.dtype == torch.float32 else model.dtype
    if not is_close(hidden[1:_PROBE_TOKENS], hidden[_PROBE_TOKENS + 1 :], dtype=dtype):
        return "its tokens influence each other outside the attention function"
    if not is_close(logits, expected, dtype=dtype):
        return "final_logits does not reproduce its logits from its hidden states"
    return None


def is_close(ours: Tensor, theirs: Tensor, *, dtype: torch.dtype, min_scale: float = 0.0) -> bool:
    """Whether two results of a model that computes in `dtype` differ by rounding only, relative to
    the largest value, or to min_scale if that is larger."""
    if ours.shape != theirs.shape:
        return False
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    scale = max(theirs.float().abs().max().item(), min_scale)
    return (ours.float() - theirs.float()).abs().max().item() <= tolerance * scale


def _attend_to_self(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    attention_mask: Tensor | None,
    *,
    millrace_probe: _Probe | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in which each token's output is its own value."""
    if millrace_probe is not None:  # a model that drops it would drop a packed layout, too
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        used = [name for name in _UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
        obstacles = [] if causal else ["its attention is not causal"]
        obstacles += [f"its attention uses {name!r}" for name in used]
        millrace_probe.obstacles.extend(obstacles)
        millrace_probe.windows.append(sliding_window)
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def register_attention(name: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
    """Make an attention function, which needs no mask, known to transformers."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


register_attention(PROBE_ATTENTION, _attend_to_self)
