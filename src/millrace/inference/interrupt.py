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

    needs_announcement = False  # True if announce() must run, between two forward passes
    may_generate = True

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    @property
    def may_land(self) -> bool:
        """True if received weights can replace the old ones now."""
        return True

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

    needs_announcement = True

    def announce(self) -> list[FinishedRequest]:
        self.may_generate = False
        return self._engine.preempt_all()

    def settle(self) -> None:
        self.may_generate = True


class DrainInterrupt(SwapInterrupt):
    """No sequence starts from the announcement on; running sequences are finished first."""

    needs_announcement = True

    @property
    def may_land(self) -> bool:
        return not self._engine.has_work

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
