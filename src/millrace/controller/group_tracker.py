"""Tracks groups by number: which are open, which are tried again, and how the others ended.

Promise: every issued number ends once, as trained, dropped or failed, and the journal says how. A
group that became too stale is issued again before anything new, up to MAX_TRIES times. An open
number that a checkpoint names is issued again by a resumed run. Every loss is counted with its
reason. Too many failures end the run; too many filtered groups are a warning, as the run still
makes progress at the price of most of its tokens. Called from the controller's event loop only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field, replace

from millrace.controller.admission import Admission
from millrace.core.errors import RunFailed, TaskError
from millrace.core.records import Group
from millrace.core.spans import GroupLife
from millrace.core.staleness import BufferedGroup, PolicyVersions, TokenVersions
from millrace.environments.rollouts.partial_rollouts import Attempt, Cancellations
from millrace.journal import Journal, NoJournal
from millrace.journal.ledger import Outcome
from millrace.tasks.streams import TaskStream

WINDOW = 100  # recent groups over which shares are taken
MAX_FAILURE_SHARE = 0.5  # of recent groups; more than half is a wrong setting, not a few bad tasks
MAX_FILTERED_SHARE = 0.9  # of recent groups, above which the run warns
FEWEST = 20  # outcomes before a share of failures means anything

DROPPED = "dropped"  # became too stale in the buffer
CANCELLED = "cancelled"  # became too stale before it reached the buffer
FAILED = "failed"  # its task or one of its scorers failed
# Of redundant episodes that were cancelled or failed: their finished turns. Tokens of an unfinished
# turn are in the engine's own counter only.
REDUNDANT = "redundant"
OUTDATED = "outdated"  # journaled before a crash and too stale when the group was resumed
NOT_RESUMED = "not_resumed"  # journaled before a crash, and no request asked for them again


@dataclass(eq=False)
class WastedTokens:
    """Counts wasted tokens and their staleness, which shows what a limit or filter selects."""

    versions: PolicyVersions = field(default_factory=PolicyVersions)
    tokens: Counter[str] = field(default_factory=Counter[str])  # by reason
    _staleness: Counter[str] = field(default_factory=Counter[str])  # summed over these tokens

    def add(self, reason: str, tokens: TokenVersions, *, version: int) -> None:
        """`version`: trainer version at which they could have been trained at the earliest."""
        tokens = self.versions.aligned(tokens, version)
        if tokens.num_tokens:
            self.tokens[reason] += tokens.num_tokens
            self._staleness[reason] += tokens.total_staleness(version)

    @property
    def staleness_means(self) -> dict[str, float]:
        return {reason: self._staleness[reason] / n for reason, n in self.tokens.items()}


@dataclass(kw_only=True, eq=False)
class _Losses:
    """Counts lost groups by reason, and their share among the recent ones."""

    max_share: float
    by_reason: Counter[str] = field(default_factory=Counter[str])
    # Why each recent group was lost; None if it passed.
    _recent: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def passed(self) -> None:
        self._recent.append(None)

    def _count(self, reason: str) -> None:
        self._recent.append(reason)
        self.by_reason[reason] += 1

    def _share(self) -> float:
        return sum(reason is not None for reason in self._recent) / len(self._recent)


@dataclass(kw_only=True, eq=False)
class Failures(_Losses):
    """Counts failed groups and ends the run if there are too many."""

    last_error: str = ""

    def failed(self, error: Exception, *, reason: str) -> None:
        """Count a failure; raises RunFailed once too many of the recent groups have failed."""
        self._count(reason)
        self.last_error = str(error)
        share = self._share()
        if len(self._recent) >= FEWEST and share > self.max_share:
            raise RunFailed(
                f"{share:.0%} of the last {len(self._recent)} groups failed, and a run stops above"
                f" {self.max_share:.0%}; the last error: {error}"
            )


@dataclass(kw_only=True, eq=False)
class Filtering(_Losses):
    """Counts filtered groups and warns if there are too many."""

    warn: Callable[[str], None]
    _has_warned: bool = False

    def passed(self) -> None:
        super().passed()
        self._has_warned = self._has_warned and self._share() > self.max_share

    def dropped(self, reason: str) -> None:
        self._count(reason)
        share = self._share()
        if len(self._recent) < WINDOW or share <= self.max_share or self._has_warned:
            return
        self._has_warned = True
        most = Counter(filter(None, self._recent)).most_common(1)[0][0]
        remedy = REMEDIES.get(most, "check what the filter drops")
        self.warn(
            f"{share:.0%} of the last {WINDOW} groups were filtered, most of them by {most!r};"
            f" {remedy}, or remove the filter."
        )


REMEDIES = {  # by filter
    "zero_variance": (
        "the tasks are too easy or too hard: choose others, set tasks.order to 'curriculum', or"
        " raise rollout.group_size"
    ),
    "overlong": "raise sampling.max_new_tokens",
}
MAX_TRIES = 3  # of a group that becomes too stale each time


@dataclass(kw_only=True, eq=False)
class GroupTracker:
    tasks: TaskStream
    journal: Journal | NoJournal
    admission: Admission
    solved_at: float  # score from which an episode counts as solved
    max_failure_share: float = MAX_FAILURE_SHARE
    max_filtered_share: float = MAX_FILTERED_SHARE
    warn: Callable[[str], None]
    now: Callable[[], float] = time.monotonic  # the clock of GroupLife
    version: int = 0  # of the trainer at the next take; with several policies, the step before it
    versions: PolicyVersions = field(default_factory=PolicyVersions)
    next_number: int = 0
    unfinished: InitVar[Iterable[int]] = ()  # numbers to issue again
    begun: InitVar[Iterable[int]] = ()  # numbers in steps that a resumed run repeats

    def __post_init__(self, unfinished: Iterable[int], begun: Iterable[int]) -> None:
        self.failures = Failures(max_share=self.max_failure_share)
        self.filtering = Filtering(max_share=self.max_filtered_share, warn=self.warn)
        self.cancellations = Cancellations()
        self.waste = WastedTokens(self.versions)
        self.lost: deque[GroupLife] = deque(maxlen=4096)  # attempts, since the last step
        self._reissue = deque(sorted(unfinished))
        self._open = set(begun)  # issued, and neither trained nor failed nor dropped
        self._tries = dict(self.journal.ledger.tries)  # finished tries of open groups, by number
        self._num_stale = 0  # groups that became too stale MAX_TRIES times

    @property
    def dropped(self) -> Counter[str]:
        """Groups that will not be tried again, by reason."""
        stale = {"stale": self._num_stale} if self._num_stale else {}
        return Counter({**stale, **self.filtering.by_reason})

    def cursor(self) -> dict[str, object]:
        """Position in the task stream, for a checkpoint."""
        return {
            "next_number": self.next_number,
            "unfinished": sorted([*self._open, *self._reissue]),
            "tasks": self.tasks.state(),
        }

    def issue(self) -> Attempt:
        if self._reissue:
            number = self._reissue.popleft()
        else:
            number = self.next_number
            self.next_number += 1
        self._open.add(number)
        self.journal.issue_task(number, draw=self.tasks.draw_of(number))
        return Attempt(number, tries=self._tries.get(number, 0), now=self.now)

    def readmit(self, number: int) -> Attempt:
        """A group that was complete before a crash and returns to the buffer."""
        self.admission.readmit()
        self._open.add(number)
        return Attempt(number, now=self.now)

    def observe(self, group: Group) -> None:
        """Report to the task stream which share of a scored group's episodes is solved."""
        number, solve_rate = group.number, group.solve_rate(self.solved_at)
        self.tasks.observe(number, solve_rate)
        self.journal.record_solve_rate(
            number, solve_rate=solve_rate, draw=self.tasks.draw_of(number)
        )

    async def admitted(self, group: Group) -> None:
        """A group has passed all filters; returns when a crash cannot lose it."""
        self.failures.passed()
        self.filtering.passed()
        await self.journal.admit_group(group)

    def failed(self, attempt: Attempt, error: Exception) -> None:
        """Raises RunFailed if too many groups have failed."""
        reason = "task" if isinstance(error, TaskError) else "score"
        self.lost.append(attempt.ended("failed", reason))
        self._drop(attempt.number, outcome="failed", reason=reason)
        self.admission.give_back()
        self.waste.add(FAILED, attempt.token_versions, version=self.version)
        self.failures.failed(error, reason=reason)

    def filtered(self, attempt: Attempt, *, reason: str) -> None:
        self.lost.append(attempt.ended("dropped", reason))
        self._drop(attempt.number, outcome="dropped", reason=reason)
        self.admission.give_back()
        self.failures.passed()
        self.filtering.dropped(reason)

    def expired(self, attempt: Attempt, *, stage: str) -> None:
        """A running group became too stale."""
        self.lost.append(attempt.ended("expired", stage))
        self.cancellations.count(stage, cut=attempt.cut)
        self.waste.add(CANCELLED, attempt.token_versions, version=self.version)
        if stage == "generating":
            self.cancellations.learn(attempt.finished)
        self._retry(attempt.number)

    def expired_in_buffer(self, waiting: BufferedGroup) -> None:
        """A group became too stale after it had reached the buffer."""
        if (life := waiting.group.life) is not None:
            end = {"ended_s": self.now(), "outcome": "expired", "reason": "waiting"}
            self.lost.append(replace(life, **end))
        self.cancellations.count("waiting")
        self.waste.add(DROPPED, waiting.unaligned or waiting.token_versions, version=self.version)
        self._retry(waiting.group.number)

    def count_unused(self, attempt: Attempt) -> None:
        """Count journaled tokens that the resumed group did not reuse."""
        if attempt.partial is not None:
            self.waste.add(OUTDATED, attempt.partial.stale, version=self.version)
            self.waste.add(NOT_RESUMED, attempt.partial.unused, version=self.version)

    def trained(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._close(number)

    def _retry(self, number: int) -> None:
        """Issue the group again, or drop it after its last try."""
        self.admission.give_back()
        tries = self._tries.get(number, 0) + 1
        if tries == MAX_TRIES:
            self._drop(number, outcome="dropped", reason="stale")
            self._num_stale += 1
            return
        self.journal.reopen_task(number)
        self._open.discard(number)
        self._tries[number] = tries
        self._reissue.appendleft(number)

    def _drop(self, number: int, *, outcome: Outcome, reason: str) -> None:
        self.journal.close_task(number, outcome=outcome, reason=reason)
        self._close(number)

    def _close(self, number: int) -> None:
        self._open.discard(number)
        self._tries.pop(number, None)
        self.tasks.finish(number)
