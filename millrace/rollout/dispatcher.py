"""Starts groups as admission allows, and takes each from task to buffer.

Promise: one bad task or one failing reward costs its group only, is counted with its reason, and
the run goes on until the share of failures among the last groups passes the limit.

Runs on the controller's event loop, one asyncio task per running group; their number is bounded by
admission.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable

from millrace.core.errors import RunFailed, ScoreError, TaskError
from millrace.core.records import Group, Task
from millrace.rollout.admission import Admission

WINDOW = 100  # groups whose failures are weighed
FEWEST = 20  # outcomes before the share means anything


class Failures:
    """Counts failed groups by reason, and says when there are too many."""

    def __init__(self, *, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self.by_reason: Counter[str] = Counter()
        self.last_sentence = ""

    def succeeded(self) -> None:
        self._recent.append(False)

    def failed(self, error: Exception) -> None:
        """Count it; raises RunFailed once too many of the recent groups failed."""
        self._recent.append(True)
        self.by_reason["task" if isinstance(error, TaskError) else "score"] += 1
        self.last_sentence = str(error)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) >= FEWEST and share > self._max_share:
            raise RunFailed(
                f"{share:.0%} of the last {len(self._recent)} groups failed"
                f" (rollout.max_failure_share = {self._max_share}); the last one: {error}"
            )


class Dispatcher:
    def __init__(
        self,
        *,
        task_of: Callable[[int], Task],
        play: Callable[[Task, int], Awaitable[Group]],
        score: Callable[[Group], Awaitable[Group]],
        admit: Callable[[Group], Awaitable[None]],
        admission: Admission,
        failures: Failures,
        next_number: int = 0,
        unfinished: Iterable[int] = (),
    ) -> None:
        self._task_of = task_of
        self._play = play
        self._score = score
        self._admit = admit
        self._admission = admission
        self._failures = failures
        self._next_number = next_number
        self._reissue = deque(sorted(unfinished))  # of an earlier life of this run; issued first
        self._open: set[int] = set()  # issued, and neither trained nor failed nor dropped
        self.playing = 0
        self.scoring = 0

    async def run(self) -> None:
        """Start groups for ever. Ends only by cancellation or by too many failures."""
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._admission.enter()
                groups.create_task(self._one_group(self._issue()))

    def finish(self, numbers: Iterable[int]) -> None:
        """These groups were trained or dropped: they will not be issued again."""
        self._open.difference_update(numbers)

    def cursor(self) -> dict[str, object]:
        """Where the task stream stands, for a checkpoint."""
        return {
            "next_number": self._next_number,
            "unfinished": sorted([*self._open, *self._reissue]),
        }

    async def _one_group(self, number: int) -> None:
        task = self._task_of(number)
        try:
            group = await self._play_and_score(task, number)
        except (TaskError, ScoreError) as error:
            self._open.discard(number)
            self._admission.give_back()
            self._failures.failed(error)
        else:
            self._failures.succeeded()
            await self._admit(group)
        finally:
            self._admission.leave()

    async def _play_and_score(self, task: Task, number: int) -> Group:
        self.playing += 1
        try:
            group = await self._play(task, number)
        finally:
            self.playing -= 1
        self.scoring += 1
        try:
            return await self._score(group)
        finally:
            self.scoring -= 1

    def _issue(self) -> int:
        if self._reissue:
            number = self._reissue.popleft()
        else:
            number = self._next_number
            self._next_number += 1
        self._open.add(number)
        return number
