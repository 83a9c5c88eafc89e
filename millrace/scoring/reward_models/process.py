"""The process of one reward model: what it is told, and what is asked of it."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

from millrace.cluster.messages import Reading, ReadSteps, StartRewardModel, StepValues
from millrace.scoring.model_process import ModelProcess
from millrace.scoring.reward_models.settings import ModelSettings


class RewardModelProcess(ModelProcess):
    ROLE = "Reward model"
    MODULE = "millrace.workers.reward_model"

    async def read(self, readings: Sequence[Reading], *, timeout_s: float) -> list[list[float]]:
        """The values of each reading's steps; raises as ask() does."""
        reply = await self.ask(ReadSteps(readings=list(readings)), timeout_s=timeout_s)
        assert isinstance(reply, StepValues)
        return reply.values


def start_message(
    settings: ModelSettings,
    *,
    head: Literal["sequence", "token"],
    is_whole: bool,
    separator: str | None = None,
    kept_tokens: int = 0,
) -> StartRewardModel:
    """Of what a kind of reward model is told, that which its process is told."""
    shared = {field.name: getattr(settings, field.name) for field in fields(ModelSettings)}
    return StartRewardModel(
        settings=shared,
        head=head,
        is_whole=is_whole,
        separator=separator,
        kept_tokens=kept_tokens,
    )
