"""Tokens that were sampled and will never be trained: how many, why, and how stale they were.

Compared with what was trained they show what a limit or a filter selects: batches that survive one
are older than what was sampled. Called from the controller's event loop only.
"""

from collections import Counter

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
