"""What a weight update does to running sequences: one class per value of weights.interrupt.

An update is announced, received while decoding continues, and lands between two forward passes. It
is settled once it has landed or was refused. A newer update may supersede it before it lands: the
newer one is announced again, and both are settled together.

The engine's thread calls all methods.
"""

from millrace.config import Interrupt
from millrace.inference.backend import EngineCore, FinishedRequest


class SwapInterrupt:
    """Sequences never stop: their next token is sampled under the new weights."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    @property
    def may_generate(self) -> bool:
        return True

    @property
    def may_land(self) -> bool:
        """True if received weights can replace the old ones now."""
        return True

    @property
    def activity(self) -> str:
        """Name of a forward pass in the trace."""
        return "generate"

    @property
    def idle_reason(self) -> str | None:
        """Why the engine idles, if the update is the reason."""
        return None

    @property
    def needs_announcement(self) -> bool:
        """True if announce() has an effect, so that it must run between two forward passes."""
        return False

    def announce(self) -> list[FinishedRequest]:
        """An update is being received; returns the requests that end now, as land() does."""
        return []

    def land(self) -> list[FinishedRequest]:
        """Called right before the weights change."""
        return []

    def settle(self) -> None:
        """The weights have changed, or the update was refused."""


class AbortInterrupt(SwapInterrupt):
    """Running sequences are returned unfinished, to be resumed on any engine."""

    def land(self) -> list[FinishedRequest]:
        return self._engine.interrupt()


class SaveInterrupt(SwapInterrupt):
    """All sequences wait from the announcement on, then continue in order of arrival."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__(engine)
        self._is_waiting = False

    @property
    def may_generate(self) -> bool:
        return not self._is_waiting

    @property
    def idle_reason(self) -> str | None:
        return "waiting for weights" if self._is_waiting and self._engine.has_work else None

    @property
    def needs_announcement(self) -> bool:
        return True

    def announce(self) -> list[FinishedRequest]:
        self._is_waiting = True
        return self._engine.preempt_all()

    def settle(self) -> None:
        self._is_waiting = False


class DrainInterrupt(SwapInterrupt):
    """No sequence starts from the announcement on; running sequences are finished first."""

    @property
    def may_land(self) -> bool:
        return not self._engine.has_work

    @property
    def activity(self) -> str:
        return "drain" if self._engine.has_held else "generate"

    @property
    def idle_reason(self) -> str | None:
        return "drained" if self._engine.has_held else None

    @property
    def needs_announcement(self) -> bool:
        return True

    def announce(self) -> list[FinishedRequest]:
        self._engine.hold_new()
        return []

    def settle(self) -> None:
        self._engine.release_new()


INTERRUPTS: dict[Interrupt, type[SwapInterrupt]] = {
    "swap": SwapInterrupt,
    "abort": AbortInterrupt,
    "save": SaveInterrupt,
    "drain": DrainInterrupt,
    "barrier": DrainInterrupt,  # the controller alternates generation and training
}
