"""What new weights do to the sequences of an engine: one class per interrupt model.

An update is announced, received beside decoding, and lands between two forward passes: then it is
settled, as it also is when it was refused. A newer update may take its place at any time before;
that is announced again, and settled once for both.

Called by the engine's thread.
"""

from millrace.config import Interrupt
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.scheduling.outputs import Finished


class SwapInterrupt:
    """Never stop: sequences go on with the next token, under the weights that are there then."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    @property
    def may_generate(self) -> bool:
        return True

    @property
    def may_land(self) -> bool:
        """True if weights that have been received can take over now."""
        return True

    @property
    def activity(self) -> str:
        """What a forward pass is called in the trace."""
        return "generate"

    @property
    def idle_reason(self) -> str | None:
        """Why there is no forward pass now, if the update is the reason."""
        return None

    @property
    def heeds_announcements(self) -> bool:
        """True if announce() does something, so that no forward pass may be under way."""
        return False

    def announce(self) -> list[Finished]:
        """An update is on its way; returns requests that end here and now, as does land()."""
        return []

    def land(self) -> list[Finished]:
        """The weights change right after this."""
        return []

    def settle(self) -> None:
        """They have changed, or were refused."""


class AbortInterrupt(SwapInterrupt):
    """What runs is given back, unfinished, to be resumed on any engine."""

    def land(self) -> list[Finished]:
        return self._engine.interrupt()


class SaveInterrupt(SwapInterrupt):
    """Everybody waits from the announcement on, and goes on in the order of arrival."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self._is_expecting = False

    @property
    def may_generate(self) -> bool:
        return not self._is_expecting

    @property
    def idle_reason(self) -> str | None:
        return "parked" if self._is_expecting and self._engine.has_work else None

    @property
    def heeds_announcements(self) -> bool:
        return True

    def announce(self) -> list[Finished]:
        self._is_expecting = True
        return self._engine.park()

    def settle(self) -> None:
        self._is_expecting = False


class DrainInterrupt(SwapInterrupt):
    """Nobody begins from the announcement on, and those in flight are finished first."""

    @property
    def may_land(self) -> bool:
        return not self._engine.has_work

    @property
    def activity(self) -> str:
        return "drain" if self._engine.holds_back else "generate"

    @property
    def idle_reason(self) -> str | None:
        return "drained" if self._engine.holds_back else None

    @property
    def heeds_announcements(self) -> bool:
        return True

    def announce(self) -> list[Finished]:
        self._engine.hold_new()
        return []

    def settle(self) -> None:
        self._engine.seat_new()


MODELS: dict[Interrupt, type[SwapInterrupt]] = {
    "swap": SwapInterrupt,
    "abort": AbortInterrupt,
    "save": SaveInterrupt,
    "drain": DrainInterrupt,
    "barrier": DrainInterrupt,  # the controller does the rest
}
