"""Counters and waiting times of one scorer queue. Called from the controller's event loop."""

from collections.abc import Callable

from millrace.core.spans import ScorerLoad


class ScorerUsage:
    def __init__(self, *, now: Callable[[], float]) -> None:
        self.in_flight = 0  # calls
        self.episodes = 0  # scored
        self.failures = 0
        self.skipped = 0
        self._calls = 0
        self._retries = 0
        self._waiting = 0  # episodes
        self._busy_s = 0.0  # integral of calls in flight over time
        self._waiting_s = 0.0  # integral of waiting episodes over time
        self._now = now
        self._since_s = now()

    def wait(self, num_episodes: int) -> None:
        self._advance()
        self._waiting += num_episodes

    def withdraw(self, num_episodes: int) -> None:
        """These episodes stop waiting without being scored."""
        self._advance()
        self._waiting -= num_episodes

    def begin(self, num_episodes: int, *, is_retry: bool) -> None:
        """A call starts with episodes that were waiting."""
        self.withdraw(num_episodes)
        self.in_flight += 1
        self._calls += 1
        self._retries += is_retry

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
