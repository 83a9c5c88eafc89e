"""The process of one reward model, and the values of a sequence's steps.

The model may have another tokenizer than the policy. Runs on the controller's event loop.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from millrace.cluster.messages import ReadSteps, StartRewardModel, StepReading, StepValues
from millrace.core.records import Prompt
from millrace.scoring.model_process import ModelProcess
from millrace.scoring.reward_models.settings import ModelSettings


class RewardModelProcess(ModelProcess):
    ROLE = "Reward model"
    MODULE = "millrace.scoring.reward_models.worker"

    async def read(self, readings: Sequence[StepReading], *, timeout_s: float) -> list[list[float]]:
        """The values of the steps of each reading; raises as ask() does."""
        reply = await self.ask(ReadSteps(readings=list(readings)), timeout_s=timeout_s)
        assert isinstance(reply, StepValues)
        return reply.values


def start_message(
    settings: ModelSettings,
    *,
    device: str,
    head: Literal["sequence", "token"],
    is_whole: bool,
    separator: str | None = None,
    kept_tokens: int = 0,
) -> StartRewardModel:
    """The start message of a reward model's process."""
    shared = {field.name: getattr(settings, field.name) for field in fields(ModelSettings)}
    return StartRewardModel(
        settings=shared,
        device=device,
        head=head,
        is_whole=is_whole,
        separator=separator,
        kept_tokens=kept_tokens,
    )


class StepReader:
    def __init__(
        self, process: RewardModelProcess, *, tokenizer: Any, takes_ids: bool, timeout_s: float
    ) -> None:
        """`tokenizer` is the policy's. `takes_ids`: the model gets token ids instead of text."""
        self.process = process
        self._tokenizer = tokenizer
        self._takes_ids = takes_ids
        self._timeout_s = timeout_s

    async def read(
        self,
        tokens: np.ndarray,
        ends: Sequence[int],
        *,
        prompt: Prompt,
        num_prompt: int,
        num_known: int = 0,
        is_partial: bool = False,
    ) -> list[float]:
        """The values of all steps but the first `num_known`.

        `tokens` [L] begin with the `num_prompt` of the prompt. `is_partial`: more will follow.
        """
        if num_known == len(ends):
            return []
        reading = StepReading(
            tokens=tokens[: ends[-1] + 1] if self._takes_ids else None,
            ends=list(ends) if self._takes_ids else [],
            prompt="" if self._takes_ids else prompt,
            pieces=[] if self._takes_ids else self._pieces(tokens, ends, num_prompt=num_prompt),
            num_known=num_known,
            is_partial=is_partial,
        )
        (values,) = await self.process.read([reading], timeout_s=self._timeout_s)
        return values

    def _pieces(self, tokens: np.ndarray, ends: Sequence[int], *, num_prompt: int) -> list[str]:
        bounds = [num_prompt, *(end + 1 for end in ends)]
        return [
            self._tokenizer.decode(
                tokens[begin:end].tolist(),
                skip_special_tokens=True,  # they mean nothing to another tokenizer
                clean_up_tokenization_spaces=False,
            )
            for begin, end in pairwise(bounds)
        ]
