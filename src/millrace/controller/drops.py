"""What is generated and never trained: failed groups, filtered groups and wasted tokens.

Promise: every loss is counted with its reason. Too many failures end the run; too many filtered
groups are a warning, as the run still makes progress at the price of most of its tokens.

Called from the controller's event loop only.
"""

from collections import Counter, deque
from collections.abc import Callable

from millrace.core.errors import RunFailed, TaskError
from millrace.core.staleness import Stamps

WINDOW = 100  # recent groups over which shares are taken
MAX_FILTERED_SHARE = 0.9  # of recent groups, above which the run warns
FEWEST = 20  # outcomes before a share of failures means anything

DROPPED = "dropped"  # became too stale in the buffer
CANCELLED = "cancelled"  # became too stale before it reached the buffer
FAILED = "failed"  # its task or one of its scorers failed
# Of redundant episodes that were cancelled or failed: their finished turns. Tokens of an unfinished
# turn are in the engine's own counter only.
REDUNDANT = "redundant"
OUTDATED = "outdated"  # journaled before a crash and too stale when the group was resumed
UNASKED = "unasked"  # journaled before a crash and not requested again by the resumed group


class Waste:
    """Counts wasted tokens and their staleness, which shows what a limit or filter selects."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()  # by reason
        self._staleness: Counter[str] = Counter()  # summed over these tokens

    def add(self, reason: str, stamps: Stamps, *, version: int) -> None:
        """`version`: trainer version at which they could have been trained at the earliest."""
        if stamps.num_tokens:
            self.tokens[reason] += stamps.num_tokens
            self._staleness[reason] += stamps.total_staleness(version)

    @property
    def staleness_means(self) -> dict[str, float]:
        return {reason: self._staleness[reason] / n for reason, n in self.tokens.items()}


def failure_reason(error: Exception) -> str:
    return "task" if isinstance(error, TaskError) else "score"


class Failures:
    """Counts failed groups by reason and ends the run if there are too many."""

    def __init__(self, *, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self.by_reason: Counter[str] = Counter()
        self.last_error = ""

    def succeeded(self) -> None:
        self._recent.append(False)

    def failed(self, error: Exception) -> None:
        """Count a failure; raises RunFailed once too many of the recent groups have failed."""
        self._recent.append(True)
        self.by_reason[failure_reason(error)] += 1
        self.last_error = str(error)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) >= FEWEST and share > self._max_share:
            raise RunFailed(
                f"{share:.0%} of the last {len(self._recent)} groups failed"
                f" (rollout.max_failure_share = {self._max_share}); the last error: {error}"
            )


class Filtering:
    """Counts filtered groups by reason and warns if there are too many."""

    def __init__(self, *, max_share: float, warn: Callable[[str], None]) -> None:
        self._max_share = max_share
        self._warn = warn
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # the filter, or None = passed
        self._has_warned = False
        self.by_reason: Counter[str] = Counter()

    def passed(self) -> None:
        self._recent.append(None)
        if self._share() <= self._max_share:
            self._has_warned = False

    def dropped(self, reason: str) -> None:
        self._recent.append(reason)
        self.by_reason[reason] += 1
        share = self._share()
        if len(self._recent) < WINDOW or share <= self._max_share or self._has_warned:
            return
        self._has_warned = True
        most = Counter(filter(None, self._recent)).most_common(1)[0][0]
        self._warn(
            f"{share:.0%} of the last {WINDOW} groups were filtered, most of them by {most!r};"
            f" {_remedy(most)}, or remove the filter."
        )

    def _share(self) -> float:
        return sum(reason is not None for reason in self._recent) / len(self._recent)


def _remedy(reason: str) -> str:
    if reason == "zero_variance":
        return (
            "the tasks are too easy or too hard: choose others, set tasks.order to 'curriculum', or"
            " raise rollout.group_size"
        )
    if reason == "overlong":
        return "raise sampling.max_new_tokens"
    return "check what the filter drops"
