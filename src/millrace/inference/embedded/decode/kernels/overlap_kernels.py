"""Programmatic dependent launch: a kernel is scheduled while the one before it still runs, and
waits inside for its results. This hides most of the gap between two short kernels. What the kernel
before does not write, such as weights, can be fetched into the L2 cache at the same time.

Some program of each such kernel waits, because the next kernel may start when all of its programs
have called begin_kernel() or ended, and only knows of this kernel. What a kernel reads before it
waits was written before the last launch without overlap: a step begins with kernels of torch.

Imported on machines with CUDA only.
"""

import functools
from typing import Any

import triton
import triton.language as tl

_CAPABILITY = 90  # of a GPU that can do this


@triton.jit
def prefetch(pointers):
    """Fetch the cache lines at these places; only if kernels overlap."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def begin_kernel(OVERLAPS: tl.constexpr):
    """A kernel that is launched with overlap_options() calls this before it reads what the kernel
    before it may write, and before it writes."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options() -> dict[str, Any]:
    """Further arguments of a launch."""
    return _options_for(triton.runtime.driver.active.get_current_target().arch)


@functools.cache
def _options_for(capability: int) -> dict[str, Any]:
    if capability < _CAPABILITY:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
