"""The barrier between turns of a synchronous run: turns of all episodes start in rounds.

Which sequences an engine batches together decides how its sums are rounded, and so does the state
of its prefix cache. Promise: a round starts when all episodes that run wait for a turn and engines
generate nothing. It takes one turn of each episode, the one with the lowest number of the call, in
the order of groups and episodes. So neither depends on how long an environment takes.

Episodes of some environments wait for each other, for example for a place in a pool. If no round
can start for stall_s, turns start when they come from then on, and the run warns about it.

Used on the controller's event loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field

STALL_S = 120.0
_Episode = tuple[int, int]  # number of the group, index in it
_Turn = tuple[int, int, int]  # the same, and number of the call


@dataclass(eq=False)
class TurnBarrier:
    # A context in which engines only collect requests; see EnginePool.together.
    together: Callable[[], AbstractAsyncContextManager[None]]
    _: KW_ONLY
    warn: Callable[[str], None]
    stall_s: float = STALL_S
    _running: set[_Episode] = field(init=False, default_factory=set[_Episode])
    _waiting: dict[_Turn, asyncio.Future[None]] = field(
        init=False, default_factory=dict[_Turn, asyncio.Future[None]]
    )
    _num_sampling: int = field(init=False, default=0)  # turns
    _round: asyncio.Task[None] | None = field(init=False, default=None)  # that starts now
    _stall: asyncio.TimerHandle | None = field(init=False, default=None)
    _is_off: bool = field(init=False, default=False)

    @contextlib.contextmanager
    def episode(self, group: int, index: int) -> Iterator[None]:
        """Enclose an episode; turns that it still waits for at its end are cancelled."""
        self._running.add((group, index))
        try:
            yield
        finally:
            self._running.discard((group, index))
            for turn in [turn for turn in self._waiting if turn[:2] == (group, index)]:
                self._waiting.pop(turn).cancel()
            self._change()

    @contextlib.asynccontextmanager
    async def turn(self, group: int, index: int, call: int) -> AsyncIterator[None]:
        """Wait for the next round. The caller must then send its request before any other await,
        and leave the context when it is answered."""
        if self._is_off:
            yield
            return
        turn, started = (group, index, call), asyncio.get_running_loop().create_future()
        self._waiting[turn] = started
        self._change()
        try:
            await started
            yield
        finally:
            if self._waiting.get(turn) is started:  # cancelled
                del self._waiting[turn]
            if started.done() and not started.cancelled() and started.exception() is None:
                self._num_sampling -= 1
            self._change()

    def _change(self) -> None:
        """Start a round if all episodes wait, and otherwise watch for a stall."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if not self._waiting or self._num_sampling or self._round is not None:
            return
        if self._may_start:
            self._round = asyncio.create_task(self._start())
        else:
            self._stall = asyncio.get_running_loop().call_later(self.stall_s, self._give_up)

    @property
    def _may_start(self) -> bool:
        return self._is_off or self._running <= {turn[:2] for turn in self._waiting}

    async def _start(self) -> None:
        try:
            async with self.together():
                lowest = {turn[:2]: turn for turn in sorted(self._waiting, reverse=True)}
                # An episode may have begun since.
                for turn in sorted(lowest.values() if self._may_start else ()):
                    self._waiting.pop(turn).set_result(None)
                    self._num_sampling += 1
        except Exception as error:  # noqa: BLE001 - raised in the episodes
            while self._waiting:
                self._waiting.popitem()[1].set_exception(error)
        self._round = None
        self._change()

    def _give_up(self) -> None:
        self._is_off = True
        waiting = {turn[:2] for turn in self._waiting}
        self.warn(
            f"For {self.stall_s:g} s, {len(waiting)} episodes waited for the next turn of"
            f" {len(self._running - waiting)} others, so turns start when they come from now on,"
            " and the run is not reproducible bit for bit; set fidelity.mode = 'exact' if episodes"
            " wait for each other or for slow tools."
        )
        self._change()
