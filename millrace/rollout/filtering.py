"""How many of the recent groups were filtered, and whether that is more than the user meant.

Dynamic sampling plays on until a batch is full of useful groups. Where nearly all of them are
dropped the run still moves, at the price of nearly all its tokens: this says so, once each time.

Called from the controller's event loop only.
"""

from collections import Counter, deque
from collections.abc import Callable

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
