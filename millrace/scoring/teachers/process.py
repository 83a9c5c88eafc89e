"""The process of one teacher: what is asked of it, and how new weights reach it."""

from collections.abc import Sequence

from millrace.cluster.messages import ScoreTokens, StartTeacher, Swap, Swapped, TokensScored
from millrace.core.passages import Likelihoods, Passage
from millrace.core.weight_update import WeightUpdate
from millrace.scoring.model_process import Launch, ModelProcess


class TeacherProcess(ModelProcess):
    """One that follows the policy remembers its past; any other is replaced when it is lost."""

    def __init__(
        self, name: str, *, start: StartTeacher, launch: Launch, start_timeout_s: float
    ) -> None:
        super().__init__(
            name,
            role="Teacher",
            module="millrace.workers.teacher",
            start=start,
            launch=launch,
            start_timeout_s=start_timeout_s,
            memory=None if start.following is None else "what it knew of the policy's past",
        )

    async def likelihoods(
        self, passages: Sequence[Passage], *, timeout_s: float
    ) -> list[Likelihoods]:
        """Raises as ask() does."""
        reply = await self.ask(ScoreTokens(passages=list(passages)), timeout_s=timeout_s)
        assert isinstance(reply, TokensScored)
        return reply.likelihoods

    async def swap(self, update: WeightUpdate) -> int:
        """Returns the version it holds now; the bytes of this one are not needed any more."""
        reply = await self.tell(Swap(update=update))
        assert isinstance(reply, Swapped)
        return reply.version
