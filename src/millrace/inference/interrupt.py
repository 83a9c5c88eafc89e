"""What a weight update does to running sequences."""

from millrace.config import Interrupt
from millrace.inference.backend import EngineCore, FinishedCompletions


class WeightInterrupt:
    """The modes of weights.interrupt.

    - "swap": sequences never stop; their next token is sampled under the new weights.
    - "abort": running sequences are returned unfinished, to be resumed on any engine.
    - "save": all sequences wait from the announcement on, then continue in order of arrival.
    - "drain", "barrier": no sequence starts from the announcement on; running sequences finish
      first. With "barrier", the controller alternates generation and training.

    An update is announced, received while decoding continues, and lands between two forward passes.
    It is settled once it has landed or was refused. A newer update may supersede it before it
    lands: the newer one is announced again, and both are settled together. The engine's thread
    calls all methods.
    """

    def __init__(self, mode: Interrupt, engine: EngineCore) -> None:
        self._mode = mode
        self._engine = engine
        self._drains = mode in ("drain", "barrier")
        self.needs_announcement = self._drains or mode == "save"  # between two forward passes
        self.may_generate = True

    @property
    def may_land(self) -> bool:
        """True if received weights can replace the old ones now."""
        return not (self._drains and self._engine.has_work)

    def announce(self) -> list[FinishedCompletions]:
        """An update is being received; returns the completions that end now, as land() does."""
        if self._drains:
            self._engine.hold_new()
        if self._mode != "save":
            return []
        self.may_generate = False
        return self._engine.preempt_all()

    def land(self) -> list[FinishedCompletions]:
        """Called right before the weights change."""
        return self._engine.interrupt() if self._mode == "abort" else []

    def settle(self) -> None:
        """The weights have changed, or the update was refused."""
        self.may_generate = True
        if self._drains:
            self._engine.release_new()
