"""Operators of Millrace's own for torch.compile: opaque nodes in a compiled layer.

Defined one level below torch.library.custom_op, whose checks at every call cost more host time than
a small kernel runs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("millrace", "FRAGMENT")


def define_operator(
    schema: str,
    *,
    cuda: Callable[..., Tensor],
    shape: Callable[..., Tensor],
    cpu: Callable[..., Tensor] | None = None,
) -> None:
    """Make torch.ops.millrace.NAME. `shape` returns an empty tensor like the result."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cuda, "CUDA")
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
    torch.library.register_fake(f"millrace::{name}", shape, lib=_LIBRARY)
