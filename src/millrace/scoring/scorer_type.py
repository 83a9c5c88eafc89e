"""The interface of a [[scorers]] type: its settings, its call settings, and how it is built.

A type is a frozen dataclass whose fields are the keys of its [[scorers]] table. It is created and
checked before any worker starts. `build` returns the Scorer that the run uses.
docs/how-to/scorers.md has a complete example in one file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millrace.cluster.supervision.pool import WorkerPool
from millrace.config import RunConfig
from millrace.core.protocols import Scorer
from millrace.core.records import Prompt, Task
from millrace.scoring.functions.workers import ScorerWorkers


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSettings:
    """How one scorer is called. The defaults suit a remote service. A [[scorers]] table can set the
    first four. A scorer type chooses the others."""

    timeout_s: float = 30.0
    concurrency: int = 64  # maximum calls in flight
    batch: int = 1  # maximum episodes of a group per call; 0 = the whole group in one call
    retries: int = 5  # after a TransientScoreError
    backoff_s: float = 0.5  # before the first retry
    breaker_failures: int = 5  # consecutive failures that open the circuit breaker; 0 = never
    breaker_s: float = 10.0  # pause while it is open; then one call is tried


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunInfo:
    """Facts about the run that a scorer may need."""

    config: RunConfig
    tokenizer: Any  # the policy's Hugging Face tokenizer
    vocab_size: int  # of the policy
    max_context: int
    render: Callable[[Prompt], np.ndarray]  # prompt -> its tokens [P] int32
    model_path: str  # weights that the engines start from
    adapter_path: str | None  # LoRA adapter on top of them
    version: int  # policy version of model_path with adapter_path


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerContext:
    """What the run provides to a scorer while it is built."""

    workers: ScorerWorkers  # the processes that run reward functions
    worker_pool: WorkerPool  # starts and supervises dedicated processes
    folder: Path  # in the run directory, for files that survive a resume
    start_timeout_s: float = 180.0
    run: RunInfo | None = None  # None outside a training run
    warn: Callable[[str], None] = print  # shows a warning to the user
    functions: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    """Functions by name. A scorer adds the functions that `workers` shall run for it."""

    def device_of(self, scorer: str) -> str:
        return "auto" if self.run is None else self.run.config.placement.model(scorer)

    @property
    def run_info(self) -> RunInfo:
        assert self.run is not None, "this scorer type needs a training run"
        return self.run


@runtime_checkable
class ScorerType(Protocol):
    """A [[scorers]] type. Called in the controller's process."""

    @property
    def default_name(self) -> str:
        """Name in metrics if the [[scorers]] table sets none."""
        ...

    def call_settings(self, *, num_workers: int) -> CallSettings:
        """Default call settings; `num_workers` is scoring.workers."""
        ...

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """Raise ConfigError for mistakes that can be found before any worker starts."""
        ...

    def build(
        self, *, name: str, weight: float, calls: CallSettings, context: ScorerContext
    ) -> Scorer:
        """Build the Scorer. The run calls its start() and close(), if it has them."""
        ...
