"""Swap probe: does an engine compute with the weights that the trainer has published?

The publisher's thread scores a fixed passage with the bytes that it sends, by plain transformers;
of a LoRA adapter, together with the frozen weights of the trainer. The logprobs travel with the
update. After its commit, an engine scores the same passage. The version that engines begin with is
checked in the same way, before they get requests.

Promise: an engine whose logprobs differ raises EngineLost with both numbers before it has sent a
token of that version; it is replaced. No step of the trainer waits for the reference.

It does not find differences below the tolerance, such as a version that is one step too old.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.config import LoraConfig
from millrace.core.errors import ConfigError, EngineLost
from millrace.core.records import ScoreRequest, SwapProbe, TokenLogprobs, WeightUpdate
from millrace.models.lora.factors import Adapter, adapter_of, factors_of

PASSAGE_TOKENS = 32
# Mean difference of a logprob between trainer and engine, in nats, by the data type of the weights.
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2, "float8": 1.0}


class ProbeReference:
    """Used by the publisher's thread, beside a trainer that uses the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        lora: LoraConfig | None = None,
        dtype: str = "",
        in_fp8: bool = False,
    ) -> None:
        """`model`: of the trainer. Its weights are read with `lora` only; else they may be sharded.
        `dtype`: of the engines; "" = that of the weights that are sent. `in_fp8`: their layers
        round more than it does."""
        config = copy.deepcopy(model.config)  # or the trainer would compute with this attention
        with torch.device("meta"):  # weights are given with each call
            self._model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self._model.eval()
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        size = config.get_text_config().vocab_size
        self._tokens = np.random.default_rng(0).integers(0, size, PASSAGE_TOKENS).tolist()
        self._dtype, self._in_fp8 = dtype, in_fp8
        self._frozen: dict[str, Tensor] = {}
        self._factors: Mapping[str, Tensor] = {}  # of the version that is being scored
        if lora is not None:
            self._add_adapter(model, adapter_of(self._model, lora))

    def _add_adapter(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """Let layers add what an adapter adds: merged weights would need memory for a model."""
        if experts := [name for name, shape in adapter.layers.items() if len(shape) == 3]:
            raise ConfigError(
                f"weights.probe cannot check an adapter of experts ({experts[0]}); list linear"
                " layers in lora.target_modules, or set weights.probe to false."
            )
        self._frozen = {
            name.replace(".base_layer.", "."): parameter.detach()
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        for layer in adapter.layers:

            def add(module: Any, given: tuple[Tensor], output: Tensor, *, at: str = layer):
                if adapter.is_dora:  # which needs the norms of one layer's merged weight
                    merged = adapter.merged(at, module.weight, self._factors)
                    return linear(given[0], merged, module.bias)
                a, b = factors_of(self._factors, at, dora=False)
                return output + adapter.scale * linear(linear(given[0], a), b)

            self._model.get_submodule(layer).register_forward_hook(add)

    @torch.no_grad()
    def __call__(self, weights: Mapping[str, Tensor]) -> SwapProbe:
        device = next(iter((self._frozen or weights).values())).device
        if self._frozen:
            self._factors = {name: factor.to(device) for name, factor in weights.items()}
            weights = self._frozen
        buffers = {name: buffer.to(device) for name, buffer in self._buffers.items()}
        tokens = torch.tensor([self._tokens], device=device)
        given = {"input_ids": tokens, "use_cache": False}
        dtype = getattr(torch, self._dtype or "float32")
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output = functional_call(self._model, {**buffers, **weights}, kwargs=given)
        logprobs = output.logits[0, :-1].float().log_softmax(-1)
        chosen = tuple(logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).tolist())
        computed_in = "float8" if self._in_fp8 else self._dtype
        return SwapProbe(tokens=tuple(self._tokens), logprobs=chosen, dtype=computed_in)


class EngineProbe:
    """What an engine's process does with the probes of updates; used by one thread."""

    def __init__(
        self, score: Callable[[Sequence[ScoreRequest]], list[TokenLogprobs]], *, name: str
    ) -> None:
        self._score = score
        self._name = name  # of the engine
        self._is_done = False  # whether any version was scored

    def check_start(self, update: WeightUpdate) -> ConfigError | None:
        """For the version that the engine has loaded by itself, before it gets requests."""
        if self._is_done or update.probe is None:
            return None
        logprobs = self._logprobs(update.probe)
        try:
            check_probe(update, logprobs, when="At the start, with")
        except EngineLost as error:
            return ConfigError(
                f"{self._name}: {str(error).rstrip('.')}; if its server is one of"
                " engine.options.attach, serve model.path there, in engine.dtype."
            )
        return None

    def check_swap(self, update: WeightUpdate) -> None:
        """After a commit; raises EngineLost."""
        if update.probe is not None:
            check_probe(update, self._logprobs(update.probe))

    def _logprobs(self, probe: SwapProbe) -> np.ndarray:
        self._is_done = True
        (scored,) = self._score([probe_request(probe)])
        return scored.logprobs


def probe_request(probe: SwapProbe) -> ScoreRequest:
    return ScoreRequest(
        tokens=np.array(probe.tokens, np.int32),
        positions=np.arange(1, len(probe.tokens), dtype=np.int32),
    )


def check_probe(
    update: WeightUpdate, logprobs: np.ndarray, *, when: str = "After the swap to"
) -> None:
    """Raise EngineLost if an engine's logprobs [n] of the passage are not those of the trainer.
    `when` begins the sentence, before the version."""
    assert update.probe is not None
    wanted = np.array(update.probe.logprobs)
    dtypes = [spec.dtype for spec in update.tensors if spec.dtype in TOLERANCES]
    dtypes = [update.probe.dtype] if update.probe.dtype else dtypes
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    difference = float(np.abs(logprobs - wanted).mean())
    if not difference <= tolerance:  # also if it is not a number
        raise EngineLost(
            f"{when} version {update.version}, a fixed passage has the mean logprob"
            f" {logprobs.mean():.4f} in this engine and {wanted.mean():.4f} in the trainer"
            f" ({difference:.4f} per token, where {tolerance:g} is allowed): the engine's weights"
            " are wrong."
        )
