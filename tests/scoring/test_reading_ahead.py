"""Steps are read while their sequence is generated, with the same values."""

import asyncio

import numpy as np
import pytest
from fakes import CharacterTokenizer

from millrace.core.errors import ScoreError
from millrace.core.records import CompletionChunk, Request, Sampling
from millrace.scoring.reward_models.steps import ReadAhead, StepReader, build_steps

STEPS = build_steps({"by": "delimiter", "delimiter": ";"}, section="scorer.steps")


class Process:
    """The value of a step is the number of tokens up to its end; waits for `let`."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.let.set()
        self.asked: list[tuple[str, int, bool]] = []  # text, known steps, whether more steps follow
        self.failure: Exception | None = None

    async def read(self, readings, *, timeout_s):
        (reading,) = readings
        text = "".join(map(chr, reading.tokens))
        self.asked.append((text, reading.num_known, reading.is_partial))
        await self.let.wait()
        if self.failure is not None:
            raise self.failure
        return [[float(end) for end in reading.ends[reading.num_known :]]]


class Rig:
    def __init__(self, *, n: int = 1, min_tokens: int = 1) -> None:
        self.process = Process()
        tokenizer = CharacterTokenizer()
        reader = StepReader(self.process, tokenizer=tokenizer, takes_ids=True, timeout_s=1.0)
        self.ahead = ReadAhead(reader, steps=STEPS, min_tokens=min_tokens)
        request = Request(id="r", prompt=ids("p="), sampling=Sampling(), n=n)
        self._on_tokens = self.ahead.stream_callback(request, prompt="p=")

    async def stream(self, text: str, *, member: int = 0, finish=None) -> None:
        zeros = np.zeros(len(text))
        piece = CompletionChunk(
            member=member,
            tokens=ids(text),
            logprobs=zeros.astype(np.float32),
            versions=zeros.astype(np.int32),
            finish=finish,
        )
        self._on_tokens(piece)
        await asyncio.sleep(0.01)

    async def values(self, text: str, ends: list[int]) -> list[float]:
        return await self.ahead.values(ids(text), ends)


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


async def test_only_the_last_step_is_unread_when_a_sequence_ends():
    rig = Rig()
    await rig.stream("ab;c")
    assert rig.process.asked == [("p=ab;", 0, True)]
    await rig.stream("d;e")
    await rig.stream("f", finish="stop")
    assert rig.process.asked[1:] == [("p=ab;cd;", 1, True), ("p=ab;cd;ef", 2, False)]
    assert await rig.values("p=ab;cd;ef", [4, 7, 9]) == [4.0, 7.0, 9.0]


async def test_steps_that_finish_during_a_call_share_the_next():
    rig = Rig()
    rig.process.let.clear()
    await rig.stream("a;")
    await rig.stream("b;c;")
    assert len(rig.process.asked) == 1
    rig.process.let.set()
    assert await rig.values("p=a;b;c;", [3, 5, 7]) == [3.0, 5.0, 7.0]
    assert rig.process.asked == [("p=a;", 0, True), ("p=a;b;c;", 1, True)]


async def test_short_steps_wait_for_min_tokens_or_the_end_of_the_sequence():
    rig = Rig(min_tokens=4)
    await rig.stream("a;")
    assert await rig.values("p=a;", [3]) == []  # not requested yet
    await rig.stream("b;c;")
    await rig.stream("d", finish="stop")
    assert rig.process.asked == [("p=a;b;c;", 0, True), ("p=a;b;c;d", 3, False)]
    assert await rig.values("p=a;b;c;d", [3, 5, 7, 8]) == [3.0, 5.0, 7.0, 8.0]


async def test_tokens_of_an_unfinished_step_count_towards_min_tokens():
    rig = Rig(min_tokens=4)
    await rig.stream("a;bcd")
    assert rig.process.asked == [("p=a;", 0, True)]


async def test_values_are_found_only_for_the_same_tokens():
    rig = Rig(n=2)
    await rig.stream("a;")
    await rig.stream("b;", member=1)
    assert await rig.values("p=b;c", [3, 4]) == [3.0]
    assert await rig.values("p=c;c", [3, 4]) == []
    assert len(rig.process.asked) == 2


async def test_steps_of_a_failed_call_have_no_value():
    rig = Rig()
    rig.process.failure = ScoreError("too long")
    await rig.stream("a;")
    await rig.stream("b;", finish="stop")
    assert await rig.values("p=a;b;", [3, 5]) == []
    assert len(rig.process.asked) == 1


async def test_close_ends_pending_lookups():
    rig = Rig()
    rig.process.let.clear()
    await rig.stream("a;")
    asking = asyncio.create_task(rig.values("p=a;", [3]))
    await asyncio.sleep(0.01)
    rig.ahead.close()
    assert await asyncio.wait_for(asking, 5) == []


@pytest.mark.parametrize("finish", ["abort", "expire"])
async def test_last_step_of_an_aborted_sequence_is_not_read(finish):
    rig = Rig()
    await rig.stream("a;b", finish=finish)
    assert rig.process.asked == [("p=a;", 0, False)]
