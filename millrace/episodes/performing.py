"""One episode from its first turn to its reward: a user's coroutine with the agents of a cast.

Promise: an episode that comes to a limit is marked and ends, whatever its environment does. What
the coroutine returns is a reward, or one TaskError sentence. Runs on the loop of the environments.
"""

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from millrace.core.errors import MillraceError, TaskError
from millrace.core.records import Branching, Episode, Task
from millrace.episodes.agent import Agent
from millrace.episodes.cast import Cast
from millrace.episodes.limits import EpisodeOver
from millrace.episodes.play import Play
from millrace.rollout.cancellation import Expired

EnvironmentFunction = Callable[[Task, Agent], Awaitable[Any]]


async def perform(
    function: EnvironmentFunction,
    task: Task,
    *,
    play: Play,
    cast: Cast,
    ended_reward: float,
    branching: Branching | None = None,
) -> Episode:
    """`ended_reward`: of an episode that came to a limit. `branching`: where it is one of a tree's
    leaves."""
    try:
        reward = await _rewarded(function, task, play=play, cast=cast, ended_reward=ended_reward)
    finally:
        play.close()  # what the environment has left running gets nothing more
    counts = {**play.counts, **cast.counts()}
    return Episode(
        turns=tuple(play.turns),
        rollouts=cast.rollouts(None if branching is None else play.tape.places()),
        reward=reward,
        ending=play.ending,
        counts={name: count for name, count in counts.items() if count},
        branching=branching,
    )


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _rewarded(
    function: EnvironmentFunction, task: Task, *, play: Play, cast: Cast, ended_reward: float
) -> float | dict[str, float] | None:
    """What the user's function returns."""
    limit: asyncio.Timeout | None = None
    try:
        async with play.timed() as limit:
            returned = await function(task, cast.agent())
    except EpisodeOver:
        return ended_reward
    except (MillraceError, Expired):
        raise
    except Exception as error:
        if limit is not None and limit.expired():
            play.end("timeout")
            return ended_reward
        raise _raised(function, error, play) from error
    if isinstance(returned, Mapping) and returned and cast.trained <= set(returned):
        return {
            str(name): _checked(function, value, play) or 0.0 for name, value in returned.items()
        }
    return _checked(function, returned, play)


def _raised(function: EnvironmentFunction, error: Exception, play: Play) -> TaskError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TaskError(
        f"{play.name}: environment {name_of(function)!r} raised {type(error).__name__}:"
        f" {error} (episode {play.index}, {last.filename}:{last.lineno}); mend it."
    )


def _checked(function: EnvironmentFunction, returned: Any, play: Play) -> float | None:
    if returned is None or (isinstance(returned, Real) and math.isfinite(returned)):
        return None if returned is None else float(returned)
    raise TaskError(
        f"{play.name}: environment {name_of(function)!r} returned {returned!r:.60};"
        " return a finite number as the reward, None to leave it to the scorers, or a dict with"
        " a number for each role that is trained."
    )
