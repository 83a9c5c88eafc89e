"""One moment of a run, as every progress view shows it."""

from dataclasses import dataclass, field

from millrace.monitoring.activity import Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """Filled by the controller a few times a second; views only read it."""

    run_dir: str
    step: int  # steps done
    steps: int  # steps to do
    version: int
    elapsed_s: float
    eta_s: float | None = None  # None until it can be told
    rewards: tuple[float, ...] = ()  # mean rewards of the steps so far; many are thinned
    accuracies: tuple[float, ...] = ()  # of the evaluations so far, likewise
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    tokens_generated: int = 0  # so far
    tokens_wasted: int = 0  # of these, which will never be trained
    buffer_depth: int = 0  # groups that wait for the trainer
    buffer_capacity: int = 1
    groups_running: int = 0  # groups being played or scored
    staleness_mean: float = 0.0  # of the tokens of the last step
    staleness_max: int = 0
    workers: dict[str, Shares | None] = field(default_factory=dict)  # None = starting
    dropped: dict[str, int] = field(default_factory=dict)  # groups, by reason
    cancelled: dict[str, int] = field(default_factory=dict)  # tries, by what they were at
    failed: dict[str, int] = field(default_factory=dict)  # groups, by reason
    steps_skipped: int = 0  # their loss or gradient was not finite
    scoring: str = ""  # that it limits the run, while it does
    restarts: dict[str, int] = field(default_factory=dict)  # by worker, of those that died
