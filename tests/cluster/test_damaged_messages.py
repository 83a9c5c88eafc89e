"""Thousands of damaged messages: each is decoded, or refused with WireError."""

from contextlib import suppress

import numpy as np
import pytest
from mutations import FEW, MANY, costs_little, mutations

from millrace.cluster.messages import Generate, GenerateDone, Message, ScoreGroup, WorkerProgress
from millrace.cluster.wire import Frame, WireError, encode, message_decoder
from millrace.core.records import Completion, Request, Sampling
from millrace.core.spans import Span


def completion() -> Completion:
    values = np.arange(5, dtype=np.int32)
    return Completion(
        tokens=values, logprobs=values / 2, versions=values, finish="stop", text="five tokens"
    )


MESSAGES: list[Message] = [
    Generate(
        request=Request(id="r", prompt=np.arange(9), sampling=Sampling(), partial=completion())
    ),
    GenerateDone(completions={0: completion(), 1: completion()}),
    ScoreGroup(
        function="f",
        prompts=["a", [{"role": "user", "content": "b"}]],
        completions=["c", "d"],
        completion_ids=[[1, 2], [3]],
        columns={"answer": [1, None, 2.5, {"x": [b"bytes"]}], "array": [np.zeros((2, 3))]},
    ),
    WorkerProgress(
        spans=[Span(worker="w", name="n", start_s=0.0, end_s=1.0, busy=True)], counters={"a": 1.0}
    ),
]


@pytest.mark.parametrize("count", [FEW, MANY])
def test_damaged_messages_are_decoded_or_refused(count):
    decoder = message_decoder()

    def read() -> None:
        for seed, message in enumerate(MESSAGES):
            frames: list[Frame] = encode(message)
            at = [seed % len(frames), 0]
            for index, changed in enumerate(
                mutations(bytes(frames[0]), count=count // len(MESSAGES), seed=seed)
            ):
                damaged = [changed, *frames[1:]]
                if index % 5 == 0:  # the number of frames, and their sizes
                    del damaged[at[index % 2] :][:1]
                    damaged.append(changed[: index % 40])
                with suppress(WireError):
                    assert isinstance(decoder.decode(damaged), Message)

    costs_little(read)
