"""The process of one teacher: scoring tokens, and new weights for a teacher that follows the
policy."""

import contextlib
from collections.abc import Sequence

from millrace.cluster.messages import ScoreTokens, Swapped, SwapWeights, TokensScored
from millrace.core.errors import WorkerError
from millrace.core.records import ScoreRequest, TokenLogprobs, WeightUpdate
from millrace.scoring.model_process import ModelProcess

SWAP_ATTEMPTS = 2


class TeacherProcess(ModelProcess):
    """A teacher that follows the policy keeps past versions in a file, which a restart loads."""

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
        """Load an update; returns the version held then, after which it may be released.

        If the process dies meanwhile, the restarted one loads the same update.
        """
        for _ in range(SWAP_ATTEMPTS):
            with contextlib.suppress(WorkerError):  # the restart is counted
                reply = await self.send(SwapWeights(update=update))
                assert isinstance(reply, Swapped)
                return reply.version
        return update.version  # both processes died; the next version will come
