"""The process of one teacher: what is asked of it, and how new weights reach it."""

import contextlib
from collections.abc import Sequence

from millrace.cluster.messages import ScoreTokens, Swapped, SwapWeights, TokensScored
from millrace.core.errors import WorkerError
from millrace.core.score_requests import ScoreRequest, TokenLogprobs
from millrace.core.weight_update import WeightUpdate
from millrace.scoring.model_process import ModelProcess

SWAP_ATTEMPTS = 2


class TeacherProcess(ModelProcess):
    """One that follows the policy keeps its past in a file, from which another goes on when it is
    lost."""

    ROLE = "Teacher"
    MODULE = "millrace.scoring.teachers.worker"

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        """Raises as ask() does."""
        reply = await self.ask(ScoreTokens(requests=list(requests)), timeout_s=timeout_s)
        assert isinstance(reply, TokensScored)
        return reply.logprobs

    async def swap(self, update: WeightUpdate) -> int:
        """Returns the version it holds now; the bytes of this one are not needed any more. Who
        takes the place of a process that is lost meanwhile is brought them, too."""
        for _ in range(SWAP_ATTEMPTS):
            with contextlib.suppress(WorkerError):  # it is replaced, and counted
                reply = await self.tell(SwapWeights(update=update))
                assert isinstance(reply, Swapped)
                return reply.version
        return update.version  # those who were to read it are no more; the next version will come
