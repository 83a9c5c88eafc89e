"""Examples of supervised fine-tuning as packed batches.

An example is a conversation ("messages"; assistant turns are trained) or a "prompt" and its
"completion" (which is trained, with the end-of-sequence token). Promise: tokens are those that
engines see and sample. Each trained turn is tokenised after the prompt that the chat template makes
for it, and text of control tokens in messages stays ordinary text. Where a template renders earlier
turns differently later, for example without their thinking, such a turn is a sequence of its own.

The batch of a step depends on the data, the seed and the step alone, so a resumed run trains each
example as often as a run that was not stopped. If a run with more epochs continues one that ended
with a short batch, its first batch has the examples that were missing there, too.
Torch-free; called in threads.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from millrace.config import RunConfig
from millrace.core.errors import ConfigError, RunFailed, TaskError
from millrace.core.microbatch import Batch
from millrace.core.records import Episode, Group, Message, Rollout, Sampling, Score, Task
from millrace.environments.rollouts.renderer import Renderer
from millrace.run.resume import Cursor
from millrace.tasks.streams import TaskStream
from millrace.training.packing.packer import pack

COMPLETION, TOOLS = "completion", "tools"  # columns
Piece = tuple[np.ndarray, int]  # tokens [L] int32, and how many of the last ones are trained


def check_examples(tasks: Sequence[Task]) -> None:
    """Raise ConfigError for an example without anything to train."""
    for index, task in enumerate(tasks):
        completion = task.columns.get(COMPLETION)
        messages = [] if isinstance(task.prompt, str) else task.prompt
        is_text = isinstance(completion, str) and completion != ""
        if messages and isinstance(completion, list):
            messages = [*messages, *completion]
        is_chat = completion is None or isinstance(completion, list)
        are_messages = all(isinstance(m, dict) and "role" in m for m in messages)
        roles = [message["role"] for message in messages] if are_messages else []
        if not is_text and not (is_chat and "assistant" in roles):
            raise ConfigError(
                f"Example {index} has no assistant message, and the completion {completion!r:.80};"
                " it needs 'messages' with an assistant's, or a prompt and its completion."
            )


@dataclass(frozen=True, slots=True, eq=False)
class ExampleEncoder:
    renderer: Renderer
    _: KW_ONLY
    eos_id: int | None
    max_tokens: int

    def encode(self, task: Task, *, number: int) -> tuple[Group, int]:
        """The example as a group, whose rollouts are its sequences, and how many of these were cut.
        One that has no trained token left is left out."""
        completion = task.columns.get(COMPLETION)
        if isinstance(task.prompt, str):
            sequences = [self._completed(task.prompt, str(completion))]
        else:
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            first = 0 if completion is None else len(task.prompt)
            messages = [*task.prompt, *(completion or ())]
            sequences = self._turns(messages, first=first, tools=task.columns.get(TOOLS) or ())
        rollouts = [self._rollout(pieces) for pieces in sequences]
        kept = tuple(rollout for rollout, _ in rollouts if rollout.mask.any())
        episode = Episode(turns=(), rollouts=kept)
        score = Score(total=1.0, parts={})
        group = Group(
            number=number, task=task, episodes=(episode,), scores=(score,), advantages=np.ones(1)
        )
        return group, sum(was_cut for _, was_cut in rollouts)

    def _completed(self, prompt: str, completion: str) -> list[Piece]:
        ids = self.renderer.encode(completion)
        if self.eos_id is not None and (not len(ids) or ids[-1] != self.eos_id):
            ids = np.append(ids, np.int32(self.eos_id))
        return [(self.renderer.render(prompt), 0), (ids, len(ids))]

    def _turns(
        self, messages: Sequence[Message], *, first: int, tools: Sequence[Any]
    ) -> list[list[Piece]]:
        """The trained turns from message `first` on, as few sequences as the template allows."""
        sequences: list[list[Piece]] = []
        known = ""  # text of the last sequence
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index < first:
                continue
            render, encode = self.renderer.chat_text, self.renderer.encode
            prompt = render(messages[:index], tools=tools)
            replied = render(messages[: index + 1], tools=tools, add_generation_prompt=False)
            if not replied.startswith(prompt):
                raise TaskError(
                    f"The chat template writes the turn {message.get('content')!r:.80} without its"
                    " generation prompt before it; set environment.template, or write the example"
                    " as prompt and completion texts."
                )
            if not sequences or not prompt.startswith(known):
                sequences.append([])
                known = ""
            reply = encode(replied[len(prompt) :])
            ends = np.flatnonzero(np.isin(reply, list(self.renderer.special_ids)))
            num_trained = int(ends[-1]) + 1 if len(ends) else len(reply)
            sequences[-1] += [(encode(prompt[len(known) :]), 0), (reply[:num_trained], num_trained)]
            if num_trained < len(reply):  # a line break after the end of the turn
                sequences[-1].append((reply[num_trained:], 0))
            known = replied
        return sequences

    def _rollout(self, pieces: Sequence[Piece]) -> tuple[Rollout, bool]:
        """The sequence, and whether it was cut."""
        tokens = np.concatenate([ids for ids, _ in pieces])
        mask = np.concatenate([np.arange(len(ids)) >= len(ids) - n for ids, n in pieces])
        was_cut = bool(mask[self.max_tokens :].any())
        tokens, mask = tokens[: self.max_tokens], mask[: self.max_tokens]
        rollout = Rollout(
            tokens=tokens.astype(np.int32),
            mask=mask,
            engine_logprobs=np.zeros(len(tokens), np.float32),  # no engine sampled it
            versions=np.where(mask, 0, -1).astype(np.int32),
            sampling=Sampling(),
        )
        return rollout, was_cut


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SupervisedBatch:
    batch: Batch
    groups: list[Group]  # one for each example that has something to train
    num_examples: int
    num_cut: int  # sequences longer than engine.max_context


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SupervisedData:
    """The batches of a run; `config` has its resolved trainer.steps."""

    config: RunConfig
    stream: TaskStream
    num_examples: int  # of all steps
    encoder: ExampleEncoder
    cursor: Cursor  # where the run begins, or is resumed

    def next_number(self, version: int) -> int:
        """The number of examples in all steps up to the one that makes `version`."""
        if version == self.cursor.version:
            return self.cursor.next_number
        return min(version * self.config.trainer.groups_per_step, self.num_examples)

    def batch(self, version: int) -> SupervisedBatch:
        """The batch of the step that makes `version`."""
        numbers = range(self.next_number(version - 1), self.next_number(version))
        return self.packed([self.stream.task(number) for number in numbers], f"step {version}")

    def packed(self, tasks: Sequence[Task], what: str) -> SupervisedBatch:
        try:
            encoded = [self.encoder.encode(task, number=n) for n, task in enumerate(tasks)]
        except TaskError as error:
            raise RunFailed(f"The examples of {what} cannot be used: {error}") from error
        groups = [group for group, _ in encoded if group.rollouts]
        if not groups:
            raise RunFailed(
                f"No example of {what} has a trained token among its first tokens; raise"
                " engine.max_context, or shorten the prompts."
            )
        trainer = self.config.trainer
        sizes = trainer.mesh_sizes
        batch = pack(
            groups,
            microbatch_tokens=trainer.microbatch_tokens * sizes.cp,
            num_ranks=sizes.num_data_ranks,
        )
        num_cut = sum(count for _, count in encoded)
        return SupervisedBatch(batch=batch, groups=groups, num_examples=len(tasks), num_cut=num_cut)

    async def redo(self, *, after: int, through: int) -> AsyncIterator[tuple[int, tuple[Batch]]]:
        """The versions after `after` and their batches, for a restarted trainer."""
        for version in range(after + 1, through + 1):
            yield version, ((await asyncio.to_thread(self.batch, version)).batch,)
