"""Starts groups as admission allows, and takes each from task to buffer.

Promise: one bad task or one failing reward costs its group only, is counted with its reason, and
the run goes on until the share of failures among the last groups passes the limit. A group that can
no longer be trained is cancelled at once and issued again, before anything new. One that a filter
drops is done with, and its place goes to a new one. What becomes of each number is in the journal,
and a group is so before it is admitted.

Runs on the controller's event loop, one asyncio task per running group; their number is bounded by
admission.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from millrace.controller.admission import Admission
from millrace.controller.drops import (
    CANCELLED,
    DROPPED,
    FAILED,
    OUTDATED,
    REDUNDANT,
    UNASKED,
    Filtering,
    Waste,
)
from millrace.core.errors import Filtered, RunFailed, ScoreError, TaskError
from millrace.core.protocols import ScoringSession
from millrace.core.records import Group, Task
from millrace.core.staleness import StalenessLimit, Stamps, Waiting
from millrace.environments.rollouts.attempt import Attempt, Cancellations, Expired
from millrace.environments.rollouts.partial_rollouts import PartialRollouts
from millrace.journal import Journal, NoJournal
from millrace.journal.ledger import Outcome

S = TypeVar("S", bound=ScoringSession)

WINDOW = 100  # groups whose failures are weighed
FEWEST = 20  # outcomes before the share means anything
MAX_TRIES = 3  # of a group that becomes too old each time


def failure_of(error: Exception) -> str:
    return "task" if isinstance(error, TaskError) else "score"


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
        self.by_reason[failure_of(error)] += 1
        self.last_sentence = str(error)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) >= FEWEST and share > self._max_share:
            raise RunFailed(
                f"{share:.0%} of the last {len(self._recent)} groups failed"
                f" (rollout.max_failure_share = {self._max_share}); the last one: {error}"
            )


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    attempt: Attempt
    task: asyncio.Task[None]
    stage: Literal["generating", "scoring", "waiting"] = "generating"
    stamps: Stamps | None = None  # of its trained tokens, once all are sampled
    is_expired: bool = False  # then it was cancelled for its age, not because the run ends


class Dispatcher(Generic[S]):
    def __init__(
        self,
        *,
        task_of: Callable[[int], Task],
        draw_of: Callable[[int], int | None],
        on_closed: Callable[[int], None],
        open_scoring: Callable[[Task, Attempt], S],
        play: Callable[[Task, Attempt, S], Awaitable[Group]],
        score: Callable[[Group, S], Awaitable[Group]],
        admit: Callable[[Group], Awaitable[None]],
        admission: Admission,
        failures: Failures,
        filtering: Filtering,
        limit: StalenessLimit,
        journal: Journal | NoJournal,
        courses: PartialRollouts,
        version: int = 0,
        next_number: int = 0,
        unfinished: Iterable[int] = (),
        begun: Iterable[int] = (),
    ) -> None:
        """`begun`: numbers in steps that a resumed run redoes."""
        self._task_of = task_of
        self._draw_of = draw_of
        self._on_closed = on_closed  # told of each number that will not be asked for again
        self._open_scoring = open_scoring
        self._play = play
        self._score = score
        self._admit = admit
        self._admission = admission
        self._failures = failures
        self._filtering = filtering
        self._limit = limit
        self._journal = journal
        self._courses = courses
        self._version = version  # of the trainer at the next take
        self._next_number = next_number
        self._reissue = deque(sorted(unfinished))  # begun before, and to be begun again; goes first
        self._open = set(begun)  # issued, and neither trained nor failed nor dropped
        self._tries = dict(journal.ledger.tries)  # of open groups that were given up before
        self._running: dict[int, _Running] = {}  # by number
        self.cancellations = Cancellations()
        self._num_stale = 0  # groups that became too old each time
        self.waste = Waste()

    @property
    def playing(self) -> int:
        return sum(running.stage == "generating" for running in self._running.values())

    @property
    def scoring(self) -> int:
        return sum(running.stage == "scoring" for running in self._running.values())

    @property
    def dropped(self) -> Counter[str]:
        """Groups that will not be tried again, by reason."""
        stale = {"stale": self._num_stale} if self._num_stale else {}
        return Counter({**stale, **self._filtering.by_reason})

    async def run(self, waiting: Iterable[Group] = ()) -> None:
        """Start groups for ever. Ends only by cancellation or by too many failures. `waiting`:
        groups that were admitted before a crash, and go back into the buffer."""
        async with asyncio.TaskGroup() as groups:
            for group in waiting:
                self._admission.enter_again()
                self._open.add(group.number)
                self._start(Attempt(group.number), groups, admitted=group)
            while True:
                await self._admission.enter()
                self._start(self._issue(), groups)

    def expire(self, version: int) -> None:
        """Cancel the groups that cannot be trained at `version`, the next take's, or ever after, as
        far as it is known here."""
        self._version = version
        for running in self._running.values():
            if self._is_ruled_out(running) and not running.is_expired:
                running.is_expired = running.task.cancel()

    def expire_waiting(self, waiting: Waiting) -> None:
        """This group reached the buffer and became too old there."""
        self.cancellations.count("waiting")
        self.waste.add(DROPPED, waiting.stamps, version=self._version)
        self._give_up(waiting.group.number)

    def finish(self, numbers: Iterable[int]) -> None:
        """These groups were trained: they will not be issued again."""
        for number in numbers:
            self._close(number)

    def cursor(self) -> dict[str, object]:
        """Where the task stream stands, for a checkpoint."""
        return {
            "next_number": self._next_number,
            "unfinished": sorted([*self._open, *self._reissue]),
        }

    def _start(
        self, attempt: Attempt, groups: asyncio.TaskGroup, *, admitted: Group | None = None
    ) -> None:
        task = groups.create_task(self._one_group(attempt, admitted))
        self._running[attempt.number] = _Running(attempt=attempt, task=task)

    async def _one_group(self, attempt: Attempt, admitted: Group | None) -> None:
        running = self._running[attempt.number]
        try:
            if admitted is None:
                group = await self._play_and_score(running)
                running.stage = "waiting"
                await self._journal.admit_group(group)
            else:
                group = self._still_fit(admitted, running)
            await self._admit(group)
        except (TaskError, ScoreError) as error:
            self._drop(attempt.number, outcome="failed", reason=failure_of(error))
            self._admission.give_back()
            self.waste.add(FAILED, attempt.stamps, version=self._version)
            self._failures.failed(error)
        except Filtered as filtered:
            self._drop(attempt.number, outcome="dropped", reason=filtered.reason)
            self._admission.give_back()
            self._failures.succeeded()
            self._filtering.dropped(filtered.reason)
        except Expired:
            self._cancelled(running)
        except asyncio.CancelledError:
            if not running.is_expired:
                raise
            self._cancelled(running)
        finally:
            self._count_forgotten(attempt)
            del self._running[attempt.number]
            self._admission.leave()

    async def _play_and_score(self, running: _Running) -> Group:
        attempt = running.attempt
        task = self._task_of(attempt.number)
        async with self._courses.opened(attempt, is_fit=self._is_fit):
            with self._open_scoring(task, attempt) as scoring:
                group = await self._play(task, attempt, scoring)
                running.stamps = Stamps.of_group(group)
                self.waste.add(REDUNDANT, attempt.given_up, version=self._version)
                if self._is_ruled_out(running):
                    raise Expired(f"group {attempt.number}")
                self.cancellations.learn(attempt.finished)
                running.stage = "scoring"
                group = await self._score(group, scoring)
        running.stamps = Stamps.of_group(group)  # scoring may have masked some tokens
        self._failures.succeeded()
        self._filtering.passed()
        return group

    def _still_fit(self, group: Group, running: _Running) -> Group:
        """A group that was admitted before; raises Expired if it has become too old."""
        running.stage = "waiting"
        running.stamps = Stamps.of_group(group)
        if self._is_ruled_out(running):
            raise Expired(f"group {group.number}")
        return group

    def _is_ruled_out(self, running: _Running) -> bool:
        """True if the limit will certainly not allow it any more."""
        if running.stamps is None and not self._limit.one_token_decides:
            return False  # tokens to come may make up for those that are too stale
        stamps = running.attempt.known if running.stamps is None else running.stamps
        return not self._limit.allows(stamps, version=self._version)

    def _is_fit(self, versions: np.ndarray) -> bool:
        """False if tokens of these versions certainly rule their group out."""
        is_decided = self._limit.one_token_decides
        return not is_decided or self._limit.allows(Stamps.of(versions), version=self._version)

    def _count_forgotten(self, attempt: Attempt) -> None:
        """What it was told before a crash and did not go on from."""
        if attempt.course is not None:
            self.waste.add(OUTDATED, attempt.course.outdated, version=self._version)
            self.waste.add(UNASKED, attempt.course.unasked, version=self._version)

    def _cancelled(self, running: _Running) -> None:
        attempt = running.attempt
        self.cancellations.count(running.stage, cut=attempt.cut)
        self.waste.add(CANCELLED, attempt.stamps, version=self._version)
        if running.stage == "generating":
            self.cancellations.learn(attempt.finished)
        self._give_up(attempt.number)

    def _give_up(self, number: int) -> None:
        """Give its place to another try at it, if it has one left."""
        self._admission.give_back()
        tries = self._tries.get(number, 0) + 1
        if tries == MAX_TRIES:
            self._drop(number, outcome="dropped", reason="stale")
            self._num_stale += 1
            return
        self._journal.reopen_task(number)
        self._open.discard(number)
        self._tries[number] = tries
        self._reissue.appendleft(number)

    def _drop(self, number: int, *, outcome: Outcome, reason: str) -> None:
        self._journal.close_task(number, outcome=outcome, reason=reason)
        self._close(number)

    def _close(self, number: int) -> None:
        self._open.discard(number)
        self._tries.pop(number, None)
        self._on_closed(number)

    def _issue(self) -> Attempt:
        if self._reissue:
            number = self._reissue.popleft()
        else:
            number = self._next_number
            self._next_number += 1
        self._open.add(number)
        self._journal.issue_task(number, draw=self._draw_of(number))
        return Attempt(number, tries=self._tries.get(number, 0))
