"""A small copy of a model's configuration, on which everything can be tried in a moment.

Promise: the copy has the model's architecture and its kinds of layers, among them one with experts
and one without if the model has both. Every threshold at which the model treats longer sequences
differently, such as a window, comes within a few tokens, in the order of the original ones. A
threshold that no sequence of the model reaches is not reached in the copy either. Weights have few
dimensions, and the vocabulary has few tokens.
"""

import copy
from typing import Any

from transformers import PreTrainedConfig

from millrace.models.directory import rope_tables

VOCAB = 64
SPECIAL_ID = 1  # of all special tokens
_HIDDEN, _HEADS, _HEAD_DIM, _ROTARY_DIM = 64, 4, 16, 8
_MAX_LAYERS = 8
_THRESHOLDS = range(5, 1000, 3)  # what thresholds become, the smallest first
_ROOM = 24  # positions after the last threshold

_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), _HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_dim"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "mamba_d_state"), _HEAD_DIM),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim"), _ROTARY_DIM),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 2 * _HEADS),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 2 * _HIDDEN),
    "attention_head_dim": 2 * _HEAD_DIM,
    "qk_head_dim": _HEAD_DIM + _ROTARY_DIM,
    "topk_group": 1,
}
_AT_MOST_TWO = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    *("n_group", "num_expert_group", "n_shared_experts", "num_shared_experts"),
    *("decoder_layers", "encoder_layers"),
    *("n_layer", "n_layers", "num_layers"),
)
_AT_MOST_FOUR = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
# Which layers have experts or attention, where a configuration has no list with all layers.
_FIRST_EXPERTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_STEPS = ("decoder_sparse_step", "moe_layer_interval")
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "hybrid_layer_ids")
_SIZE_ENDINGS = ("_size", "_dim", "_rank", "_width", "_inner", "_channels")
_IN_ROPE = "original_max_position_embeddings"
_THRESHOLD_NAMES = (
    *("sliding_window", "window_size", "attention_chunk_size", "floor_scale"),
    *("index_topk", _IN_ROPE),
)
_KEPT = ("patch_size", "temporal_patch_size", "spatial_merge_size", "image_size")


def shrunk(config: PreTrainedConfig, *, num_layers: int | None = None) -> PreTrainedConfig:
    """A small copy of a configuration; `num_layers`: only the first of chosen_layers()."""
    small = copy.deepcopy(config)
    for name, value in vars(small).items():
        if isinstance(value, PreTrainedConfig):
            vars(small)[name] = shrunk(value, num_layers=num_layers)
    vars(small).pop("quantization_config", None)
    vars(small).update(_small_values(small, chosen_layers(config)[:num_layers]))
    return small


def chosen_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that the copy has: the first of every kind, and at least two."""
    config = config.get_text_config()
    count = _num_layers(config)
    kinds = {repr(_kind(config, i)): i for i in reversed(range(count))}
    chosen = sorted(kinds.values())[:_MAX_LAYERS]
    if hasattr(config, "expert_layer_period"):  # a layer's number decides its kind (Jamba)
        chosen = list(range(min(chosen[-1] + 1, _MAX_LAYERS)))
    return chosen if len(chosen) > 1 else list(range(min(count, 2)))


def thresholds(config: PreTrainedConfig) -> list[int]:
    """Lengths within the model's limit beyond which it treats sequences differently, ascending."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    found = {value for name, value in vars(config).items() if _is_threshold(name, value)}
    found |= {rope[_IN_ROPE] for rope in rope_tables(config) if rope.get(_IN_ROPE)}
    return sorted(value for value in found if limit is None or value < limit)


def _num_layers(config: PreTrainedConfig) -> int:
    return getattr(config, "num_hidden_layers", None) or 2


def _first_sharing(config: PreTrainedConfig) -> int:
    """The first of the layers that use keys and values of earlier ones."""
    return _num_layers(config) - (getattr(config, "num_kv_shared_layers", None) or 0)


def _kind(config: PreTrainedConfig, layer: int) -> list[Any]:
    """What a layer has in common with others of its kind."""
    values, count = vars(config), _num_layers(config)
    kind = [layer < _first_sharing(config), _has_experts(config, layer)]
    kind += [layer in (values.get(name) or ()) for name in _LAYER_NUMBERS]
    for part in ("attn", "expert"):  # Jamba
        if period := values.get(f"{part}_layer_period"):
            kind.append(layer % period == values[f"{part}_layer_offset"])
    return kind + [
        value[layer] for name, value in values.items() if _is_per_layer(name, value, count)
    ]


def _has_experts(config: PreTrainedConfig, layer: int) -> bool:
    """Whether a mixture has experts in a layer, as far as its number decides that."""
    values = vars(config)
    first = max(values.get(name) or 0 for name in _FIRST_EXPERTS)
    step = max(values.get(name) or 1 for name in _STEPS)
    in_range = first <= layer <= values.get("moe_layer_end_index", layer)
    is_dense = layer in (values.get("mlp_only_layers") or ())
    return in_range and (layer + 1) % step == 0 and not is_dense


def _is_per_layer(name: str, value: Any, count: int) -> bool:
    is_list = isinstance(value, list | tuple) and name not in _LAYER_NUMBERS
    return is_list and len(value) == count


def _is_threshold(name: str, value: Any) -> bool:
    is_length = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_length and name.endswith(_THRESHOLD_NAMES)


def _small_values(config: PreTrainedConfig, layers: list[int]) -> dict[str, Any]:
    """The attributes that differ in the copy."""
    count, found = _num_layers(config), thresholds(config)
    shorter = dict(zip(found, _THRESHOLDS, strict=False))
    limit = (list(shorter.values()) or [0])[-1] + _ROOM
    experts = [place for place, i in enumerate(layers) if _has_experts(config, i)]
    dense = [place for place in range(len(layers)) if place not in experts]
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if _is_per_layer(name, value, count):
            small[name] = [_small(name, value[i], config) for i in layers]
        elif name in ("max_position_embeddings", "n_positions") and isinstance(value, int):
            small[name] = limit
        elif _is_threshold(name, value):
            small[name] = shorter.get(value, limit)
        elif name in _FIRST_EXPERTS:
            small[name] = experts[0] if experts else len(layers)
        elif name == "moe_layer_end_index":
            small[name] = experts[-1] if experts else -1
        elif name in _STEPS:
            small[name] = 1
        elif name == "mlp_only_layers":
            small[name] = dense
        elif name in _LAYER_NUMBERS and value is not None:
            small[name] = [place for place, i in enumerate(layers) if i in value]
        elif name == "num_hidden_layers":
            small[name] = len(layers)
        elif name == "num_kv_shared_layers":
            small[name] = sum(i >= _first_sharing(config) for i in layers)
        else:
            small[name] = _small(name, value, config)
    rope = copy.deepcopy(getattr(config, "rope_parameters", None))
    if rope:
        small["rope_parameters"] = rope
        dim = small.get("qk_rope_head_dim") or small.get("head_dim") or _HEAD_DIM
        for one in [v for v in rope.values() if isinstance(v, dict)] or [rope]:
            _shrink_rope(one, dim=dim, shorter=shorter, limit=limit)
    return small


def _small(name: str, value: Any, config: PreTrainedConfig) -> Any:
    """A size of the copy, or the value itself where it is none."""
    if name.endswith(("token_id", "token_index")) and isinstance(value, int):
        return SPECIAL_ID
    if name.endswith(("token_id", "token_ids")) and isinstance(value, list):
        return [SPECIAL_ID]
    if name == "head_dim" and value == getattr(config, "qk_rope_head_dim", ...):
        return _ROTARY_DIM
    if value is None and name in ("head_dim", "num_key_value_heads"):
        return _HEAD_DIM if name == "head_dim" else _HEADS
    if not isinstance(value, int) or isinstance(value, bool) or name in _KEPT:
        return value
    if name == "num_heads" and hasattr(config, "expand"):  # Mamba2
        return int(config.expand * _HIDDEN) // _HEAD_DIM
    if name in ("mamba_d_head", "mamba_headdim"):  # all heads together have the inner size
        inner = getattr(config, "mamba_d_ssm", None) and _SIZES["mamba_d_ssm"]
        inner = inner or int(getattr(config, "mamba_expand", 2) * _HIDDEN)
        return inner // _SIZES["mamba_n_heads"]
    if name in _SIZES:
        return _SIZES[name]
    if "vocab" in name:
        return VOCAB
    if name in _KV_HEADS:
        heads = getattr(config, "num_attention_heads", None)
        return _HEADS if value == heads else min(value, _HEADS // 2)
    if name in _AT_MOST_TWO:
        return min(value, 2)
    if name in _AT_MOST_FOUR:
        return min(value, 4)
    if name.endswith("head_dim"):
        return _HEAD_DIM
    return min(value, 32) if name.endswith(_SIZE_ENDINGS) else value


def _shrink_rope(rope: dict[str, Any], *, dim: int, shorter: dict[int, int], limit: int) -> None:
    num_angles = int(dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if _IN_ROPE in rope:
        rope[_IN_ROPE] = shorter.get(rope[_IN_ROPE], limit)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            factors = rope[name]
            rope[name] = [factors[i * len(factors) // num_angles] for i in range(num_angles)]
    for name in ("mrope_section", "xdrope_section"):
        if name in rope:
            total = sum(rope[name])
            parts = [part * num_angles // total for part in rope[name]]
            rope[name] = [parts[0] + num_angles - sum(parts), *parts[1:]]
