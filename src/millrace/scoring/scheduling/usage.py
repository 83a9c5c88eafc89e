"""Counts what happens at one scorer's desk, and how long. Called from the controller's loop."""

from collections.abc import Callable

from millrace.core.spans import ScorerLoad


class ScorerUsage:
    def __init__(self, *, now: Callable[[], float]) -> None:
        self.in_flight = 0  # calls
        self.episodes = 0  # judged
        self.failures = 0
        self.skipped = 0
        self._calls = 0
        self._retries = 0
        self._waiting = 0  # episodes
        self._busy_s = 0.0  # seconds times calls in flight
        self._waiting_s = 0.0  # seconds times episodes waiting
        self._now = now
        self._since_s = now()

    def wait(self, num_episodes: int) -> None:
        self._advance()
        self._waiting += num_episodes

    def withdraw(self, num_episodes: int) -> None:
        """These wait no longer, and were not judged."""
        self._advance()
        self._waiting -= num_episodes

    def begin(self, num_episodes: int, *, again: bool) -> None:
        """A call goes; `again`: not for the first time."""
        self._advance()
        self._waiting -= num_episodes
        self.in_flight += 1
        self._calls += 1
        self._retries += again

    def end(self) -> None:
        self._advance()
        self.in_flight -= 1

    def load(
        self, *, concurrency: int, breaker_opened: int, is_held: bool, lost: int
    ) -> ScorerLoad:
        self._advance()
        return ScorerLoad(
            concurrency=concurrency,
            in_flight=self.in_flight,
            waiting=self._waiting,
            busy_s=self._busy_s,
            waiting_s=self._waiting_s,
            episodes=self.episodes,
            calls=self._calls,
            retries=self._retries,
            failures=self.failures,
            skipped=self.skipped,
            breaker_opened=breaker_opened,
            is_held=is_held,
            lost=lost,
        )

    def _advance(self) -> None:
        now_s = self._now()
        self._busy_s += self.in_flight * (now_s - self._since_s)
        self._waiting_s += self._waiting * (now_s - self._since_s)
        self._since_s = now_s
