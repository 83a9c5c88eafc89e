"""The self-test at load: Millrace computes what transformers computes, or refuses the model.

The test runs on the CPU with a small copy of the model's configuration and random weights, before
any weight is loaded. Ragged sequences, some of which share a prompt and some of which pass every
length threshold of the model, go through the code that the process is about to use: an engine with
its KV cache, or packed sequences as in the trainer. Each logprob must be that of a plain forward
pass over its sequence alone, with the attention of transformers.

Promise: a batch whose sequences influence each other, attention that is called several times in a
layer, and a window that is known to the mask alone are found, whatever the architecture is.
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from millrace.core.errors import ConfigError
from millrace.models.attention.recurrent import fix_time_limits, mixers_of
from millrace.models.directory import max_positions
from millrace.models.logprobs import final_logits
from millrace.models.shrinking import SPECIAL_ID, VOCAB, chosen_layers, shrunk, thresholds

PROBE_ATTENTION = "millrace_probe"
TOLERANCE = 1e-4  # of logprobs, in nats
_UNSUPPORTED_LAYERS = {
    "indexed_attention": "an indexer in its layers chooses the tokens that attention sees",
    "compressed_sparse_attention": "its layers attend to compressed blocks of tokens",
}
_UNSUPPORTED_ARGUMENTS = {
    "position_bias": "its attention adds a bias to the scores of positions",
    "indices": "its attention sees chosen tokens only",
    "block_indices": "its attention sees chosen blocks of tokens only",
}
_BEYOND = 12  # tokens of the longest sequence after the last threshold
# What forward passes raise that take other inputs, or have an attention or cache of their own.
RUNNING_ERRORS = (TypeError, AttributeError, ValueError, RuntimeError, LookupError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredTokens:
    tokens: np.ndarray  # [L] int64
    logprobs: np.ndarray  # [n] float32; of the last n tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPath:
    """A registered attention function, and how a process that uses it computes logprobs."""

    name: str
    user: str  # "engine" or "trainer"
    # Takes a model with this attention, and sequences to score or to generate.
    score: Callable[[PreTrainedModel, Sequence[np.ndarray]], list[ScoredTokens]]


# Part of a sentence, and what the code of the model raised.
Obstacle = tuple[str, Exception | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What the result of a self-test depends on."""

    text: str  # of the configuration
    attention: AttentionPath
    config: PreTrainedConfig = field(compare=False)
    trust_remote_code: bool


def check_supported(
    config: PreTrainedConfig, *, path: str, attention: AttentionPath, trust_remote_code: bool
) -> None:
    """Refuse a model whose logprobs Millrace would not reproduce."""
    found = find_obstacle(config, attention=attention, trust_remote_code=trust_remote_code)
    if found is not None:
        obstacle, error = found
        name = (config.architectures or [config.model_type])[0]
        raise ConfigError(
            f"Model {path!r} ({name}) is not supported: {obstacle}; use a decoder-only"
            " transformer such as Llama, Qwen or Gemma."
        ) from error


def find_obstacle(
    config: PreTrainedConfig, *, attention: AttentionPath, trust_remote_code: bool = False
) -> Obstacle | None:
    """Why such a model is not supported; None if it is. A process tests a configuration once."""
    text, trust = config.to_json_string(), trust_remote_code
    return _tested(_Case(text=text, attention=attention, config=config, trust_remote_code=trust))


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _tested(case: _Case) -> Obstacle | None:
    user = case.attention.user
    with torch.random.fork_rng(devices=[]):
        try:
            layers = getattr(case.config.get_text_config(), "layer_types", None) or []
            if unknown := sorted(_UNSUPPORTED_LAYERS.keys() & layers):
                return _UNSUPPORTED_LAYERS[unknown[0]], None
            model = _random_model(case, num_layers=None)
            _plain_logits(model, np.arange(3))
        except (*RUNNING_ERRORS, ImportError) as error:
            start = "a small copy of it does not run as a language model"
            return f"{start}, because {_cause(error)}", error
        if model.get_output_embeddings() is None:
            return "it has no language-model head", None
        calls = _attention_calls(model)
        if not calls and not mixers_of(model):
            start = "its attention does not go through transformers' AttentionInterface"
            return f"{start} with all arguments", None
        if obstacle := next((call.obstacle for call in calls if call.obstacle), None):
            return obstacle, None
        try:
            difference = _difference(case, model)
        except RUNNING_ERRORS as error:
            start = f"it does not run with the attention of the {user}"
            return f"{start}{_place(case)}, because {_cause(error)}", error
        if difference <= TOLERANCE:
            return None
        start = f"in its self-test, the {user}'s logprobs differ from those of transformers by"
        return f"{start} {difference:.2g} nats{_place(case)}{_reason(case, calls)}", None


def _cause(error: Exception) -> str:
    """An error of a model's code in plain words; its own text names parts of that code."""
    if isinstance(error, ImportError):
        named = re.search(r"requires the (\S+) library", str(error))
        package = error.name or (named and named[1])
        return f"it needs the package {package!r}" if package else "it needs another package"
    if "get_text_config" in str(error):
        return "it has several text models"
    if isinstance(error, AttributeError | LookupError):
        return "its code looks up a setting or a layer that it does not have"
    if isinstance(error, TypeError):
        return "its code takes other arguments"
    if isinstance(error, ValueError | AssertionError):
        return "its code does not accept these settings or inputs"
    if re.search(r"\b(size|shape|dimension)", str(error)):
        return "the sizes of its tensors do not fit together"
    return "its computation fails"


def _random_model(case: _Case, *, num_layers: int | None) -> PreTrainedModel:
    """A small copy of the model. Its weights are far from 0, so that mistakes show in logprobs."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(
            shrunk(case.config, num_layers=num_layers),
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=case.trust_remote_code,
        )
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(noise * 0.1)
    name_backbone(model)
    return model.eval()


def _difference(case: _Case, model: PreTrainedModel) -> float:
    """The largest difference to a logprob of transformers."""
    fix_time_limits(model)
    plain = copy.deepcopy(model)
    limit = max_positions(model.config.get_text_config())
    reach = max(thresholds(model.config), default=0) + _BEYOND
    model.set_attn_implementation(case.attention.name)
    use_own_classes(model)
    fix_rotary_factors(model)
    scored = case.attention.score(model, _sequences(min(reach, limit or reach)))
    differences = [np.abs(_plain_logprobs(plain, s) - s.logprobs).max() for s in scored]
    return float(np.max(differences))  # unlike max(), never drops NaN


def _sequences(longest: int) -> list[np.ndarray]:
    """Three sequences; the first two share a prompt."""
    generator = np.random.default_rng(0)
    lengths = (longest, longest - 2, longest // 2 + 1)
    sequences = [generator.integers(SPECIAL_ID + 1, VOCAB, length) for length in lengths]
    shared = longest // 2
    sequences[1][:shared] = sequences[0][:shared]
    return sequences


def _plain_logits(model: PreTrainedModel, tokens: np.ndarray) -> Tensor:  # [L, V]
    return model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]


def _plain_logprobs(model: PreTrainedModel, scored: ScoredTokens) -> np.ndarray:
    logprobs = _plain_logits(model, scored.tokens)[:-1].log_softmax(-1).numpy()
    chosen = np.take_along_axis(logprobs, scored.tokens[1:, None], axis=1)[:, 0]
    return chosen[-len(scored.logprobs) :]


def _place(case: _Case) -> str:
    """The first layer whose copy alone, on top of those before, fails or makes a difference."""
    for count, layer in enumerate(chosen_layers(case.config), start=1):
        try:
            agrees = _difference(case, _random_model(case, num_layers=count)) <= TOLERANCE
        except RUNNING_ERRORS:
            agrees = False
        if not agrees:
            return f", from layer {layer} on"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What the attention function was called with."""

    layer: int | None
    window: int | None
    obstacle: str | None  # what Millrace's attention does not support


def _attention_calls(model: PreTrainedModel) -> list[_Call]:
    """The calls of one pass; none if the attention function cannot be replaced, or does not get the
    arguments that are given to the model."""
    model = copy.deepcopy(model)
    calls: list[_Call] = []
    try:
        model.set_attn_implementation(PROBE_ATTENTION)
        model.base_model(input_ids=torch.arange(4)[None], use_cache=False, millrace_calls=calls)
    except RUNNING_ERRORS:
        return []
    return calls


def _reason(case: _Case, calls: list[_Call]) -> str:
    """What explains a difference, as the end of a sentence."""
    most = max(Counter(call.layer for call in calls).values(), default=0)
    if most > 1:
        return f", because a layer calls attention {most} times"
    window = getattr(case.config.get_text_config(), "sliding_window", None)
    if window is not None and not any(call.window for call in calls):
        return f", because the window of {window} tokens reaches the attention mask alone"
    model, tokens = _random_model(case, num_layers=None), np.arange(3)
    hidden = model.base_model(input_ids=torch.from_numpy(tokens)[None]).last_hidden_state[0]
    if not is_close(final_logits(model, hidden), _plain_logits(model, tokens), dtype=torch.float32):
        return ", because its logits are not the product of its hidden states and its head"
    return ""


def name_backbone(model: PreTrainedModel) -> None:
    """Make base_model the model without its head: Llama 4 names a module that it lacks."""
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        vars(model)["base_model_prefix"] = "model"


def use_own_classes(model: PreTrainedModel) -> None:
    """Replace the classes of modules whose code does not fit flat batches or CUDA graphs, or that
    computes every expert for every token (Llama 4)."""
    kind = model.config.get_text_config().model_type
    if kind == "llama4_text":
        from millrace.models.architectures import llama4  # slow import

        llama4.use_own_classes(model)
    elif kind == "phimoe":
        from millrace.models.architectures import phimoe  # slow import

        phimoe.use_own_classes(model)


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
    millrace_calls: list[_Call] | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in which each token's output is its own value."""
    if millrace_calls is not None:  # a model that drops it would drop a packed layout, too
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        obstacles = [] if causal else ["its attention is not causal"]
        named = _UNSUPPORTED_ARGUMENTS.items()
        obstacles += [text for name, text in named if kwargs.get(name) is not None]
        layer = getattr(module, "layer_idx", None)
        obstacle = obstacles[0] if obstacles else None
        millrace_calls.append(_Call(layer=layer, window=sliding_window, obstacle=obstacle))
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def fix_rotary_factors(model: nn.Module) -> None:
    """Keep rotary factors that would follow the longest sequence of a pass. Within max_positions()
    they never change, and to look at that sequence means to wait for the device."""

    def fixed(kind: str) -> str:
        return "default" if kind == "longrope" or "dynamic" in kind else kind

    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            vars(module)["rope_type"] = fixed(kind)
        elif isinstance(kind, dict):  # by type of layer
            vars(module)["rope_type"] = {layer: fixed(own) for layer, own in kind.items()}


def register_attention(name: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
    """Make an attention function, which needs no mask, known to transformers."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


register_attention(PROBE_ATTENTION, _attend_to_self)
