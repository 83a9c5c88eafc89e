"""Losses that are sums over the target tokens of a sequence, as the Tinker API defines them.

They are never divided by a number of tokens, so gradients of several calls add up.
r = exp(logprob - sampled logprob), A = advantage.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from millrace.core.errors import TaskError

# (logprobs, inputs by name, settings by name) -> sum
SummedLoss = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # of r


def _cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], _: object) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], _: object) -> Tensor:
    return -((logprobs - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], clip: Mapping[str, float]) -> Tensor:
    """-min(r A, clip(r) A)"""
    ratios, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    clipped = ratios.clamp(clip["clip_low_threshold"], clip["clip_high_threshold"])
    return -torch.minimum(ratios * advantages, clipped * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], clip: Mapping[str, float]) -> Tensor:
    """-clip(r) A logprob, where clip(r) is a constant."""
    ratios = (logprobs.detach() - inputs["logprobs"]).exp()
    clipped = ratios.clamp(clip["clip_low_threshold"], clip["clip_high_threshold"])
    return -(clipped * inputs["advantages"] * logprobs).sum()


# Function, inputs besides the targets, and settings with their defaults.
_LOSSES: dict[str, tuple[SummedLoss, tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, ("logprobs", "advantages"), {}),
    "ppo": (_ppo, ("logprobs", "advantages"), _CLIP),
    "cispo": (_cispo, ("logprobs", "advantages"), _CLIP),
}


def summed_loss(
    name: str, settings: Mapping[str, float]
) -> tuple[SummedLoss, tuple[str, ...], dict[str, float]]:
    """The loss, the names of its inputs, and all its settings; raises TaskError."""
    if name not in _LOSSES:
        raise TaskError(f"Loss {name!r} is unknown; this server has {', '.join(_LOSSES)}.")
    function, inputs, defaults = _LOSSES[name]
    if unknown := sorted(settings.keys() - defaults.keys()):
        known = ", ".join(defaults) or "none"
        raise TaskError(f"Loss {name!r} has no setting {unknown[0]!r}; it has {known}.")
    return function, inputs, {**defaults, **settings}
