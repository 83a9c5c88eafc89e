"""Tokens that were sampled and will never be trained: how many, why, and how stale they were.

Compared with what was trained they show what a limit or a filter selects: batches that survive one
are older than what was sampled. Called from the controller's event loop only.

How many of the recent groups were filtered, and whether that is more than the user meant.

Dynamic sampling plays on until a batch is full of useful groups. Where nearly all of them are
dropped the run still moves, at the price of nearly all its tokens: this says so, once each time.

Called from the controller's event loop only.
"""

from collections import Counter, deque
from collections.abc import Callable

from millrace.core.staleness import Stamps

DROPPED = "dropped"  # waited in the buffer until it was too stale
CANCELLED = "cancelled"  # given up before, because it could not be trained any more
FAILED = "failed"  # its task or a score failed
# In episodes that were begun for redundancy and given up, or failed: whole turns of theirs. What an
# engine had sampled of the turn under way is in its own counter only.
REDUNDANT = "redundant"
# Told before a crash of the controller, and too stale when the group was played again.
OUTDATED = "outdated"
# Likewise, and not asked for again: its environment went another way, or the group was given up.
UNASKED = "unasked"


class Waste:
    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()  # by reason
        self._staleness: Counter[str] = Counter()  # summed over these tokens

    def add(self, reason: str, stamps: Stamps, *, version: int) -> None:
        """`version`: the trainer's, at which they would have been trained at the earliest."""
        if stamps.num_tokens:
            self.tokens[reason] += stamps.num_tokens
            self._staleness[reason] += stamps.total_staleness(version)

    @property
    def staleness_means(self) -> dict[str, float]:
        return {reason: self._staleness[reason] / n for reason, n in self.tokens.items()}


WINDOW = 100  # groups


class Filtering:
    def __init__(self, *, max_share: float, warn: Callable[[str], None]) -> None:
        self._max_share = max_share
        self._warn = warn
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # by what each was dropped
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
            f"{share:.0%} of the last {WINDOW} groups were filtered, most of them by {most!r}, more"
            f" than rollout.max_filtered_share = {self._max_share:g}; {_remedy(most)}, or take the"
            " filter out."
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
    return "see what it looks for"
