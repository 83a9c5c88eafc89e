"""Runs the decoder layers of common models by few kernels, instead of by the code of transformers.

The layers of Llama, Mistral, Qwen2 and Qwen3 consist of RMSNorms, rotary attention, and a gated
SiLU MLP or experts. They need no torch.compile, so an engine starts sooner. On a GPU,
fused_kernels.py computes what lies between the matrix products; the plain functions here are the
reference of its tests, and what the self-test of models runs on a CPU.

Promise: the same weights, at the same addresses, give what transformers computes, up to rounding.

The engine's thread calls everything. T = rows of a pass, I and O = input and output size of a
product, H = size of the residual stream, P = parts of a sum, D = head size.
"""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.inference.embedded.decode.attention import DecodeLayer, PrefillLayer, Rotation
from millrace.inference.embedded.decode.experts import can_use_kernels
from millrace.inference.embedded.decode.fp8_layers import Fp8Linear
from millrace.inference.embedded.decode.fused_linear import FusedLinear, fused_slice_of, is_product
from millrace.inference.embedded.decode.tilings import Tiling, tiling_of
from millrace.inference.embedded.fp8 import FP8, quantize_rows
from millrace.inference.embedded.routes import RecordedRouter
from millrace.models.attention.layout import ScoreRules
from millrace.models.routing import rule_of

# Their layers are equal, up to norms of queries and keys, biases, windows and experts.
_MODELS = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"})
# Kinds of rotary embedding whose angles depend on the position alone.
_STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
_MAX_PARTS = 8  # of a product; the norm that sums them reads each
_Rows = tuple[Tensor, Tensor | None]  # [T, I], and in FP8 their scales [T, 1]


def can_fuse(model: PreTrainedModel, rules: Mapping[int, ScoreRules]) -> bool:
    """Whether a FusedModel computes what the model, with fused projections, does. `rules` of
    attention by layer."""
    base: Any = model.base_model
    own_module = type(base).__module__
    return (
        type(base).__name__ in _MODELS
        and own_module.startswith("transformers.models.")
        and base.rotary_emb.rope_type in _STATIC_ROTATIONS
        and model.config.get_text_config().hidden_act == "silu"
        and all(rule.is_plain for rule in rules.values())
        and all(_can_fuse_layer(layer, own_module) for layer in base.layers)
    )


def _can_fuse_layer(layer: Any, own_module: str) -> bool:
    """Whether the parts of a layer have the code of this module of transformers, and sibling
    projections are one product. A model with code of its own may replace any of them."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = [layer, attention, mlp, layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        parts += [attention.q_norm, attention.k_norm]
    inputs = [(attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,)]
    if hasattr(mlp, "gate_proj"):
        inputs += [(mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]
    return (
        all(type(part).__module__ == own_module for part in parts)
        and not any("forward" in vars(part) for part in parts)
        and all(is_product(projection) for siblings in inputs for projection in siblings)
        and all(len({id(fused_slice_of(p)[0]) for p in siblings}) == 1 for siblings in inputs)
    )


class FusedModel:
    """Takes the place of the forward function of a base model in passes of the decode loop and of
    prefill; others run the function itself."""

    def __init__(
        self,
        model: PreTrainedModel,  # with fused projections
        caches: Mapping[int, Tensor],
        rules: Mapping[int, ScoreRules],  # of attention, by layer
        *,
        max_context: int,
    ) -> None:
        base: Any = model.base_model
        self._own: Callable[..., Any] = base.forward
        self._embed, self._norm, self._dtype = base.embed_tokens, base.norm, model.dtype
        angles = _angles(base.rotary_emb, max_context, device=model.device)
        self._layers = [
            _FusedLayer(layer, angles, cache=caches[i], rules=rules[i])
            for i, layer in enumerate(base.layers)
        ]

    def forward(self, **kwargs: Any) -> Any:
        paged = kwargs.get("millrace_paged")
        if not isinstance(paged, DecodeLayer | PrefillLayer):
            return self._own(**kwargs)
        residual = self._embed(kwargs["input_ids"])[0].float()
        positions, parts = kwargs["position_ids"][0], None
        for layer in self._layers:
            parts = layer.run(residual, parts, positions=positions, paged=paged)
        hidden, _ = _normalized(residual, parts, self._norm, dtype=self._dtype)
        return SimpleNamespace(last_hidden_state=hidden[None])


class _FusedLayer:
    def __init__(self, layer: Any, angles: Tensor, *, cache: Tensor, rules: ScoreRules) -> None:
        attention = layer.self_attn
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
        # Norms of queries and keys have the eps of all norms.
        self._rotation = Rotation(angles, norms, layer.input_layernorm.variance_epsilon)
        self._cache, self._rules = cache, rules
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv, self._out = FusedProduct(attention.q_proj), FusedProduct(attention.o_proj)
        self._dim = attention.head_dim  # all sizes are known from weights: a part is no nn.Linear
        queries, keys = (len(p.weight) for p in (attention.q_proj, attention.k_proj))
        self._num_heads = queries // self._dim, keys // self._dim
        is_dense = hasattr(layer.mlp, "gate_proj")
        self._mlp = FusedMlp(layer.mlp) if is_dense else FusedExperts(layer.mlp)

    def run(
        self,
        residual: Tensor,  # [T, H] float32; written
        parts: Tensor | None,  # [P, T, H]; what the layer before adds to it
        *,
        positions: Tensor,  # [T]
        paged: DecodeLayer | PrefillLayer,
    ) -> Tensor:  # what this layer adds to it
        before_attention, before_mlp = self._norms
        rows = _normalized(residual, parts, before_attention, dtype=self._qkv.input_dtype)
        joint = self._qkv.multiply(rows)
        attended = self._attend(joint, positions, paged._replace(cache=self._cache))
        parts = self._out.parts(_in_dtype(attended.flatten(1), self._out.input_dtype))
        rows = _normalized(residual, parts, before_mlp, dtype=self._mlp.input_dtype)
        return self._mlp.parts(rows)

    def _attend(
        self, joint: Tensor, positions: Tensor, paged: DecodeLayer | PrefillLayer
    ) -> Tensor:
        num_queries, num_keys = self._num_heads
        heads = joint.view(len(joint), -1, self._dim)
        query, key, value = heads.split([num_queries, num_keys, num_keys], dim=1)
        if isinstance(paged, DecodeLayer) and joint.is_cuda:
            return paged.attend_rotated(query, key, value, self._rules, self._rotation)
        _rotate(joint, positions, self._rotation, num_heads=self._num_heads)
        return paged.attend(query, key, value, self._rules)


class FusedProduct:
    """A matrix product of a layer: one projection, or several of one input."""

    def __init__(self, projection: nn.Module) -> None:
        owner: Any = fused_slice_of(projection)[0]
        matrix = owner.matrix if isinstance(owner, FusedLinear | Fp8Linear) else None
        self._weight: Tensor = owner.weight
        self._scales = None if matrix is None else matrix.scales
        self._bias: Tensor | None = owner.bias
        self._dtype: torch.dtype = owner.weight.dtype if matrix is None else owner.dtype
        self.input_dtype: torch.dtype = owner.weight.dtype

    def multiply(self, rows: _Rows) -> Tensor:  # [T, O]
        if tiling := self._tiling(rows):
            return self._kernel(rows, tiling=tiling, bias=self._bias)[0]
        return self._plain(rows)

    def parts(self, rows: _Rows) -> Tensor:  # [P, T, O]; the output is their sum
        if self._bias is None and (tiling := self._tiling(rows, max_parts=_MAX_PARTS)):
            return self._kernel(rows, tiling=tiling, dtype=torch.float32)
        return self._plain(rows)[None]

    def gated(self, rows: _Rows, *, dtype: torch.dtype) -> _Rows:
        """silu(gate) * up, [T, O / 2], of a product that computes both; in FP8 with scales."""
        if self._bias is None and (tiling := self._tiling(rows, is_gated=True)):
            return _in_dtype(self._kernel(rows, tiling=tiling, is_gated=True)[0], dtype)
        return _gate(self._plain(rows), dtype=dtype)

    def _tiling(self, rows: _Rows, *, is_gated: bool = False, max_parts: int = 1) -> Tiling | None:
        """How fused_kernels.py computes the product; None = torch computes it."""
        values, _ = rows
        if not values.is_cuda or values.dtype == torch.float32:
            return None
        num_out, num_in = self._weight.shape
        return tiling_of(
            (len(values), num_out // 2 if is_gated else num_out, num_in),
            itemsize=values.itemsize,
            shared_bytes=_shared_bytes(values.device),
            is_gated=is_gated,
            max_parts=max_parts,
        )

    def _kernel(self, rows: _Rows, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        weight = (self._weight, self._scales)
        return _kernels().fused_kernels.product(rows, weight, dtype=dtype or self._dtype, **options)

    def _plain(self, rows: _Rows) -> Tensor:
        values, scales = rows
        if self._scales is None:
            return F.linear(values, self._weight, self._bias)
        output = torch.ops.millrace.fp8_product(values, scales, self._weight, self._scales)
        output = output.to(self._dtype)
        return output if self._bias is None else output + self._bias


class FusedMlp:
    def __init__(self, mlp: Any) -> None:
        self._gate_up, self._down = FusedProduct(mlp.gate_proj), FusedProduct(mlp.down_proj)
        self.input_dtype = self._gate_up.input_dtype

    def parts(self, rows: _Rows) -> Tensor:
        return self._down.parts(self._gate_up.gated(rows, dtype=self._down.input_dtype))


class FusedExperts:
    """Experts, and their router, which computes in float32."""

    input_dtype = torch.float32

    def __init__(self, block: Any) -> None:
        self._block, self._router, self._experts = block, block.gate, block.experts
        rule = rule_of(self._router)
        self._recorder = rule if isinstance(rule, RecordedRouter) else None
        self._has_kernels = (
            can_use_kernels(block.experts)
            and self._router.weight.shape[1] % 32 == 0
            and rule is self._recorder
        )

    def parts(self, rows: _Rows) -> Tensor:
        hidden, _ = rows
        gate_up, down = self._experts.gate_up_proj, self._experts.down_proj
        if not hidden.is_cuda or not self._has_kernels:
            return self._block(hidden[None])
        router = self._router
        if len(hidden) * router.top_k > _kernels().expert_kernels.MAX_ROWS:
            return self._block(hidden[None])
        scores = _kernels().fused_kernels.router_scores(hidden, router.weight)
        chosen, weights = _kernels().expert_kernels.route(
            scores, top_k=router.top_k, normalizes=router.norm_topk_prob
        )
        if self._recorder is not None:
            chosen = self._recorder.choose(chosen, scores=scores)
        outputs = _kernels().expert_kernels.expert_outputs(hidden, chosen, weights, gate_up, down)
        return outputs.transpose(0, 1)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def _kernels() -> Any:
    """The kernels' package. Triton is there on machines with CUDA only."""
    from millrace.inference.embedded.decode import kernels
    from millrace.inference.embedded.decode.kernels import (  # noqa: F401 - now attributes of it
        expert_kernels,
        fused_kernels,
        rotary_kernels,
    )

    return kernels


def _angles(rotary: Any, num_positions: int, *, device: torch.device) -> Tensor:
    """[positions, 2, D / 2]; cosines and sines of the rotary embedding."""
    positions = torch.arange(num_positions, device=device)[None]
    with torch.inference_mode():
        both = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = both[0].shape[-1] // 2
    return torch.stack([part[0, :, :half] for part in both], dim=1).contiguous()


def _normalized(residual: Tensor, parts: Tensor | None, norm: Any, *, dtype: torch.dtype) -> _Rows:
    """The norm of the residual stream, to which the parts are added first."""
    add = plain_add_norm
    if residual.is_cuda:
        add = _kernels().fused_kernels.add_norm
    return add(residual, parts, norm.weight, eps=norm.variance_epsilon, dtype=dtype)


def plain_add_norm(
    residual: Tensor,  # [T, H] float32; written if there are parts
    parts: Tensor | None,  # [P, T, H]
    weight: Tensor,  # [H]
    *,
    eps: float,
    dtype: torch.dtype,
) -> _Rows:
    if parts is not None:
        residual += parts.float().sum(0)
    inverse = torch.rsqrt(residual.square().mean(-1, keepdim=True) + eps)
    return _in_dtype(residual * inverse * weight.float(), dtype)


def _gate(both: Tensor, *, dtype: torch.dtype) -> _Rows:
    if both.is_cuda:
        return _kernels().fused_kernels.gate(both, dtype=dtype)
    return plain_gate(both, dtype=dtype)


def plain_gate(both: Tensor, *, dtype: torch.dtype) -> _Rows:
    gate, up = both.float().chunk(2, dim=-1)
    return _in_dtype(F.silu(gate) * up, dtype)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> _Rows:
    if dtype != FP8:
        return x.to(dtype), None
    if x.is_cuda:
        return _kernels().fused_kernels.quantize(x)
    return quantize_rows(x)


def _rotate(
    joint: Tensor, positions: Tensor, rotation: Rotation, *, num_heads: tuple[int, int]
) -> None:
    """Apply a Rotation in place to the queries and keys of rows [T, (H + 2 K) D]."""
    if joint.is_cuda:
        _kernels().rotary_kernels.rotate(joint, positions, rotation, num_heads=num_heads)
        return
    plain_rotate(joint, positions, rotation, num_heads=num_heads)


def plain_rotate(
    joint: Tensor, positions: Tensor, rotation: Rotation, *, num_heads: tuple[int, int]
) -> None:
    half = rotation.angles.shape[2]
    heads = joint.view(len(joint), -1, 2 * half)[:, : sum(num_heads)]
    x = heads.float()
    if rotation.norms is not None:
        weights = [w.float().expand(n, -1) for w, n in zip(rotation.norms, num_heads, strict=True)]
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rotation.eps) * torch.cat(weights)
    cosine, sine = rotation.angles[positions][:, :, None].unbind(1)
    first, second = x.split(half, dim=-1)
    heads.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1))
