"""The process of a teacher or reference model: its settings, and the calls it answers."""

import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from millrace.cluster.messages import (
    ScoreTokens,
    StartTeacher,
    Swapped,
    SwapWeights,
    TokensScored,
)
from millrace.config.section import Dtype, PositiveInt
from millrace.core.errors import WorkerError
from millrace.core.plugins import plugin
from millrace.core.records import ScoreRequest, Task, TokenLogprobs, WeightUpdate
from millrace.scoring.model_process import MODEL_CALLS, ModelProcess
from millrace.scoring.scorer_type import CallSettings, ScorerContext

SWAP_ATTEMPTS = 2


class TeacherProcess(ModelProcess):
    """A self-teacher saves its weights in a file, which a restarted process loads."""

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
        """Load an update, also into a restarted process. Returns the version held then, after
        which the update may be released."""
        for _ in range(SWAP_ATTEMPTS):
            with contextlib.suppress(WorkerError):  # the restart is counted
                reply = await self.ask_once(SwapWeights(update=update), timeout_s=None)
                assert isinstance(reply, Swapped)
                return reply.version
        return update.version  # both processes died; the next version will come


@plugin
class LogprobModelSettings:
    """How a process that computes logprobs is run. The fields are keys of [[scorers]]."""

    dtype: Dtype = "auto"
    """Data type of the model. "auto" is bfloat16 on CUDA and float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads."""
    pass_tokens: PositiveInt = 8192
    """Token budget of one forward pass. A longer sequence gets a pass of its own."""
    logprob_chunk: PositiveInt = 1024
    """Number of tokens whose logits are held in memory at once."""

    def call_settings(self, *, num_workers: int) -> CallSettings:
        """One call per group, because its rollouts share their prompt."""
        return replace(MODEL_CALLS, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """By default any task will do."""

    def process_settings(self) -> dict[str, Any]:
        """The fields of this class alone, without those of subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(LogprobModelSettings)}

    def make_process(
        self, name: str, *, model: str, context: ScorerContext, **self_teacher: Any
    ) -> TeacherProcess:
        """Build a process that is not started yet. `self_teacher`: more fields of StartTeacher."""
        config = context.run_info.config
        start = StartTeacher(
            config=config.model_dump(mode="json"),
            settings=self.process_settings(),
            device=config.placement.model(name),
            model_path=model,
            **self_teacher,
        )
        return TeacherProcess(
            name,
            start=start,
            worker_pool=context.worker_pool,
            start_timeout_s=context.start_timeout_s,
        )
