"""What a kind of scorer is: settings of its own that become a Scorer, and how that is called.

A kind is a frozen dataclass whose fields are the keys of its [[scorer]] table. It is made and
checked before any worker starts; `make` gives the Scorer that the run uses. See
docs/how-to/scorers.md.
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
class CallRules:
    """How one scorer is called. The defaults are those of a service."""

    timeout_s: float = 30.0
    concurrency: int = 64  # calls in flight
    batch: int = 1  # episodes of a group per call at most; 0 = all of them, in one call
    retries: int = 5  # of a TransientScoreError
    backoff_s: float = 0.5  # before the first of these
    breaker_failures: int = 5  # in a row, before calls wait; 0 = never
    breaker_s: float = 10.0
    priority: int = 0  # in the line for a scorer process


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunFacts:
    """What a scorer may want to know of the run it belongs to."""

    config: RunConfig
    tokenizer: Any  # of the policy; any Hugging Face tokenizer object
    vocab_size: int  # of the policy
    max_context: int
    render: Callable[[Prompt], np.ndarray]  # a prompt -> its tokens [P] int32
    model_path: str  # what engines begin with,
    adapter_path: str | None  # what goes on top of it, and
    version: int  # the Version that this is


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerTools:
    """What a scorer may use of the run it belongs to."""

    workers: ScorerWorkers  # the processes that run functions
    worker_pool: WorkerPool  # starts and supervises processes of a scorer's own
    folder: Path  # in the run directory, for what a scorer wants to find again after a resume
    start_timeout_s: float = 180.0
    run: RunFacts | None = None  # None = it belongs to none
    warn: Callable[[str], None] = print  # for who watches the run
    functions: dict[str, str | Callable[..., Any]] = field(default_factory=dict)
    """By name; what a scorer puts here while it is made, `workers` can run."""

    @property
    def facts(self) -> RunFacts:
        assert self.run is not None, "scorers of this kind are made for a run"
        return self.run


@runtime_checkable
class ScorerKind(Protocol):
    """Called in the controller's process."""

    @property
    def default_name(self) -> str:
        """In metrics, where [[scorer]] gives none."""
        ...

    def rules(self, *, num_workers: int) -> CallRules:
        """How it is called where [[scorer]] does not say. `num_workers` = scoring.workers."""
        ...

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """Raise ConfigError for what can be known to be wrong before any worker starts."""
        ...

    def make(self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools) -> Scorer:
        """The Scorer, not yet started: one that has start() and close() is told when."""
        ...
