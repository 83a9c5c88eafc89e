"""Decode steps as CUDA graphs: captured once for each shape, replayed for each step.

A replay costs the host one call instead of hundreds. Weights and all state live at fixed
addresses, so a graph stays valid over weight swaps and over rounds. Elsewhere than on CUDA a step
simply runs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

_WARMUPS = 2  # passes before a capture: the first one compiles, and allocates what stays


class StepShape(NamedTuple):
    """What the work of a step depends on, besides the values in its tensors."""

    num_rows: int
    splits: int  # see DecodeLayer
    truncates: bool


class StepGraphs:
    """Used by the engine's thread."""

    def __init__(self, step: Callable[[StepShape], None], *, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __contains__(self, shape: StepShape) -> bool:
        """True if run(shape) needs no capture."""
        return self._pool is None or shape in self._graphs

    def capture(self, shape: StepShape) -> None:
        """Make run(shape) possible. The step runs a few times; whatever it wrote is garbage."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self._step(shape)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because a thread that stages weights may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(shape)
        self._graphs[shape] = graph

    def run(self, shape: StepShape) -> None:
        if self._pool is None:
            self._step(shape)
            return
        self._graphs[shape].replay()
