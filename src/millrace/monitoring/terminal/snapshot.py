"""One moment of a run, as the controller reports it and as every progress view shows it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.config.section import UNBOUNDED
from millrace.core.spans import ScorerLoad
from millrace.monitoring.activity import Shares
from millrace.monitoring.terminal.text import counts

Counts = dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGauges:
    """The controller's state at one moment; totals are since the start of the run."""

    version: int  # of the trainer; = steps done
    buffer_depth: int = 0  # groups that wait for the trainer
    groups_running: int = 0  # groups that are being generated or scored
    groups_dropped: Counts = field(default_factory=Counts)  # by reason
    groups_cancelled: Counts = field(default_factory=Counts)
    """Attempts that became too stale, by what they were doing."""
    groups_failed: Counts = field(default_factory=Counts)  # by reason
    tokens_saved: int = 0  # estimate: tokens that cancelled attempts would still have generated
    tokens_wasted: Counts = field(default_factory=Counts)  # never trained, by reason
    wasted_staleness: dict[str, float] = field(default_factory=dict[str, float])
    """Mean staleness of the wasted tokens, by reason."""
    steps_skipped: int = 0  # steps whose loss or gradient was not finite
    last_failure: str = ""  # sentence of the newest failure
    engine_waits_for: str = ""  # why an idle engine has no work
    trainer_waits_for: str = ""
    scorers: dict[str, ScorerLoad] = field(default_factory=dict[str, ScorerLoad])
    sequences_resumed: int = 0  # sequences resumed on another engine after a crash
    resumed_tokens: int = 0  # journaled tokens reused after a crash of the controller
    evaluating: tuple[int, int] | None = None  # tasks done and in total, during an evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """Filled by the monitor a few times a second; views only read it."""

    run_dir: str
    gauges: RunGauges
    steps: int  # in total
    elapsed_s: float  # since the run started
    eta_s: float | None = None  # None before the first step
    curve: str = "reward"  # what `values` are; "loss" in supervised fine-tuning
    values: Sequence[float] = ()  # mean of each step so far
    evaluations: Sequence[float] = ()  # their accuracies or losses so far
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    tokens_generated: int = 0  # so far
    buffer_capacity: int = 1
    staleness_mean: float = 0.0  # of the tokens of the last step
    staleness_max: int = 0
    workers: dict[str, Shares | None] = field(default_factory=dict)  # None = starting
    phases: dict[str, str] = field(default_factory=dict)  # by worker, while it starts
    scoring: str = ""  # a warning while scoring limits the run
    restarts: Counts = field(default_factory=Counts)  # by worker

    @property
    def losses(self) -> dict[str, str]:
        """Groups that were not trained and workers that were replaced, as text by kind."""
        gauges = self.gauges
        by_kind = {
            "dropped": gauges.groups_dropped,
            "cancelled": gauges.groups_cancelled,
            "failed": gauges.groups_failed,
            "restarts": self.restarts,
            "skipped": {"steps that were not finite": gauges.steps_skipped},
        }
        return {kind: counts(found) for kind, found in by_kind.items() if any(found.values())}

    @property
    def is_supervised(self) -> bool:
        """Supervised runs have no buffer and no staleness."""
        return self.curve == "loss"

    @property
    def evaluated(self) -> str:
        return "held-out loss" if self.is_supervised else "accuracy"

    @property
    def buffer_text(self) -> str:
        bound = "unbounded" if self.buffer_capacity == UNBOUNDED else str(self.buffer_capacity)
        return f"{self.gauges.buffer_depth}/{bound}"
