"""Triton without a GPU: kernels are compiled for one, or interpreted."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest


class Compiled(list[Any]):
    """The kernels that a test compiled."""

    @property
    def shared_bytes(self) -> int:
        return max(kernel.metadata.shared for kernel in self)


class _Driver:
    """Of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # Triton keeps one target for each device

    def get_current_stream(self, device: int) -> int:
        return 0


INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETS or find_spec("triton") is None:
    collect_ignore = ["test_compiled_kernels.py"]

if INTERPRETS:

    @pytest.fixture(autouse=True)
    def driver_of_no_gpu() -> None:
        """The kernels ask it whether they can overlap."""
        from triton.runtime import driver

        driver.set_active(_Driver(80))


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Compiled]]:
    """Call it with a capability, such as 90: from then on, launches compile their kernel for that
    GPU, and compute nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled, run = Compiled(), JITFunction.run

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    def begin(capability: int) -> Compiled:
        driver.set_active(_Driver(capability))
        monkeypatch.setattr(JITFunction, "run", only_compile)
        return compiled

    yield begin
    driver._active = None
