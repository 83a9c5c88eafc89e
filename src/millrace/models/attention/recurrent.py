"""Layers with a recurrent state: gated delta nets, Mamba and short convolutions (mixers).

The code of a mixer is that of transformers. It takes sequences side by side, each from its first
token or from a state on, and a pass of Millrace is one flat batch. So the forward function of each
mixer is replaced: it gives the mixer whole sequences, as the pass says.

Promise: a row depends on the rows of its own sequence alone, those of its parent included. A packed
pass computes rows of a parent again for each of its children, in mixers only.

The pass is set before the model runs and stays set, because gradient checkpointing runs layers
again, and because some models hand no keyword arguments to their mixers. Used by one thread.

T = rows of a pass, b = sequences of a call, L = their padded length, D = hidden size.
"""

import functools
import inspect
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from millrace.models.attention.layout import PackedLayout


def mixers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The mixers of a model, by name."""
    found = {name: module for name, module in model.named_modules() if _is_mixer(module)}
    # Some layers have the signature of the mixer that they contain.
    return {n: m for n, m in found.items() if not any(o.startswith(f"{n}.") for o in found)}


def begin_pass(model: PreTrainedModel, current: PackedLayout | Any) -> None:
    """Set what the model's mixers compute from now on: packed sequences, or a pass of an engine,
    whose method mix() gets the rows [T, D] of a mixer; None = what transformers computes."""
    mixers = vars(model).get("mixers")
    if mixers is None:
        fix_time_limits(model)
        mixers = vars(model)["mixers"] = list(mixers_of(model).values())
        for mixer in mixers:
            mixer.forward = MethodType(_forward, mixer)
    for mixer in mixers:
        vars(mixer)["current_pass"] = current


def fix_time_limits(model: PreTrainedModel) -> None:
    """Give mixers the limits of time steps that the configuration has. Those of Nemotron-H take
    time_step_min instead, in forward passes alone, so a decode step would compute otherwise."""
    limits = getattr(model.config.get_text_config(), "time_step_limit", None)
    for mixer in mixers_of(model).values():
        if limits is not None and hasattr(mixer, "time_step_limit"):
            vars(mixer)["time_step_limit"] = tuple(limits)


def run_mixer(mixer: Any, hidden: Tensor, cache: Cache | None = None) -> Tensor:
    """The output of sequences [b, L, D], which continue the states in `cache` and update them."""
    argument = _cache_argument(type(mixer))
    assert argument is not None
    return type(mixer).forward(mixer, hidden, **{argument: cache})


@torch.compiler.disable  # its control flow depends on the pass
def _forward(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    current = mixer.current_pass
    if current is None:
        return type(mixer).forward(mixer, hidden_states, *args, **kwargs)
    if isinstance(current, PackedLayout):
        rows = hidden_states[0]
        assert len(rows) == current.num_rows, "context parallelism divides sequences"
        groups, place_of_row = current.sequences
        # Padding comes after every real row, so causality hides it.
        parts = [run_mixer(mixer, rows[index]).flatten(0, 1) for index in groups]
        return torch.cat(parts)[place_of_row][None]
    return current.mix(mixer, hidden_states[0])[None]


def _is_mixer(module: nn.Module) -> bool:
    if not hasattr(module, "layer_idx") or (argument := _cache_argument(type(module))) is None:
        return False
    return argument == "cache_params" or any(isinstance(m, nn.Conv1d) for m in module.children())


@functools.cache
def _cache_argument(kind: type[nn.Module]) -> str | None:
    """The name of the cache in the signature of a module's forward function."""
    names = inspect.signature(kind.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), None)
