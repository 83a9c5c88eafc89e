"""Requests and results of teachers, with a process that answers by a formula."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import make_group

from millrace.cluster.messages import StartTeacher, Swapped, SwapWeights, TokensScored
from millrace.cluster.supervision.pool import WorkerPool
from millrace.core.errors import ScoreError, WorkerError
from millrace.core.records import Group, Prompt, ScoreRequest, Task, TokenLogprobs, WeightUpdate
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.teacher import ReferenceScorer, TeacherScorer, TeacherSettings


class FormulaProcess:
    """The logprob of a token is minus its id, minus a hundredth of its position."""

    def __init__(self, *, version: int | None = None) -> None:
        self.max_context = 100
        self.asked: list[ScoreRequest] = []
        self._version = version

    async def score(
        self, requests: Sequence[ScoreRequest], *, timeout_s: float
    ) -> list[TokenLogprobs]:
        self.asked += requests
        return [
            TokenLogprobs(
                logprobs=(-p.tokens[p.positions] - p.positions / 100).astype(np.float32),
                top_ids=np.tile(np.arange(p.top_k, dtype=np.int32), (len(p.positions), 1)),
                top_logprobs=np.full((len(p.positions), p.top_k), -2.0, np.float32),
                version=self._version,
            )
            for p in requests
        ]


def render(prompt: Prompt) -> np.ndarray:
    assert isinstance(prompt, str)
    return np.array([ord(c) for c in prompt], np.int32)


def teacher(process: FormulaProcess, **settings) -> TeacherScorer:
    return TeacherScorer(
        name="teacher",
        weight=1.0,
        model=process,  # pyright: ignore[reportArgumentType]
        settings=TeacherSettings(**settings),
        timeout_s=9.0,
        render=render,
    )


def with_task(group: Group, **task) -> Group:
    return Group(number=group.number, task=Task(**task), episodes=group.episodes)


async def test_teacher_returns_logprobs_of_sampled_tokens_and_its_version():
    process = FormulaProcess(version=4)
    group = make_group(size=2)
    results = await teacher(process, top_k=3, temperature=0.5).score(group)
    assert [result.score for result in results] == [None, None]
    for rollout, result in zip(group.rollouts, results, strict=True):
        teaching = result.token_scores[0].teacher
        assert teaching is not None
        assert teaching.version == 4
        places = np.arange(len(rollout.tokens))
        expected = np.where(rollout.mask, -rollout.tokens - places / 100, 0).astype(np.float32)
        np.testing.assert_array_equal(teaching.logprobs, expected)
        assert teaching.top_ids is not None
        assert teaching.top_ids[rollout.mask].tolist() == [[0, 1, 2]] * 4
        assert teaching.top_ids[~rollout.mask].tolist() == [[0, 0, 0]] * 3
    assert {request.temperature for request in process.asked} == {0.5}
    assert all(request.kept is None for request in process.asked)


async def test_hinted_prompt_replaces_the_prompt_before_the_same_tokens():
    process = FormulaProcess()
    group = with_task(make_group(size=1), prompt="abc", columns={"answer": "{x}"})
    hinted = teacher(process, hint="answer", template="{hint}!{prompt}")
    (result,) = await hinted.score(group)
    (request,), (rollout,) = process.asked, group.rollouts
    sampled = rollout.tokens[rollout.mask]
    assert "".join(map(chr, request.tokens[: -len(sampled)])) == "{x}!abc"
    assert request.tokens[request.positions].tolist() == sampled.tolist()
    teaching = result.token_scores[0].teacher
    assert teaching is not None
    places = np.arange(7, 7 + len(sampled))  # after the longer prompt
    expected = (-sampled - places / 100).astype(np.float32)
    np.testing.assert_array_equal(teaching.logprobs[rollout.mask], expected)


def test_the_hint_of_a_chat_goes_into_its_last_message():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    task = Task(prompt=messages, columns={"answer": "42"})
    hinted = TeacherSettings(hint="answer", template="{prompt} ({hint})").hinted_prompt(task)
    assert hinted == [messages[0], {"role": "user", "content": "u (42)"}]
    assert messages[1]["content"] == "u"


def test_braces_in_the_prompt_or_the_hint_are_text():
    task = Task(prompt="{hint} {x}", columns={"answer": "{prompt}"})
    settings = TeacherSettings(hint="answer", template="{prompt}, {hint}, {y}")
    assert settings.hinted_prompt(task) == "{hint} {x}, {prompt}, {y}"


@pytest.mark.parametrize(
    ("settings", "task", "is_taught"),
    [
        ({}, {"source": "math"}, True),
        ({"tasks": ("math",)}, {"source": "math"}, True),
        ({"tasks": ("math",)}, {"source": "code"}, False),
        ({"tasks": ("3",), "column": "level"}, {"columns": {"level": 3}}, True),
        ({"tasks": ("3",), "column": "level"}, {"columns": {"level": 4}}, False),
        ({"tasks": ("3",), "column": "level"}, {"source": "3"}, False),
    ],
)
async def test_teacher_skips_tasks_that_it_does_not_cover(settings, task, is_taught):
    process = FormulaProcess()
    group = with_task(make_group(size=2), prompt="p", **task)
    results = await teacher(process, **settings).score(group)
    assert [bool(result.token_scores) for result in results] == [is_taught] * 2
    assert bool(process.asked) == is_taught


async def test_sequence_too_long_for_the_teacher_fails_its_group():
    process = FormulaProcess()
    process.max_context = 5
    with pytest.raises(ScoreError, match="reads at most 5 tokens, and group 0 has 6"):
        await teacher(process).score(make_group())


async def test_reference_uses_the_sampling_distribution():
    process = FormulaProcess()
    group = make_group(size=2, kept=True, temperature=0.7)
    scorer = ReferenceScorer(
        name="reference",
        weight=1.0,
        model=process,  # pyright: ignore[reportArgumentType]
        timeout_s=9.0,
    )
    results = await scorer.score(group)
    for rollout, result, request in zip(group.rollouts, results, process.asked, strict=True):
        assert request.temperature == 0.7
        assert request.kept is not None
        rows = np.split(request.kept.ids, request.kept.offsets[1:-1])
        assert [row[0] for row in rows] == rollout.tokens[rollout.mask].tolist()
        found = result.token_scores[0].reference_logprobs
        assert found is not None
        assert (found[~rollout.mask] == 0).all()
        assert (found[rollout.mask] < 0).all()


class MortalWorker:
    """Answers, or dies at the first request."""

    def __init__(self, *, dies: bool) -> None:
        self.dead = asyncio.get_running_loop().create_future()
        self._dies = dies

    def kill(self) -> None:
        assert self.dead.done()

    async def start_as(self, message, *, timeout_s: float) -> None:
        """It has nothing to load."""

    async def call(self, message, *, timeout_s: float | None = None):
        if self._dies:
            error = WorkerError("Worker 't' died.", worker="t")
            if not self.dead.done():
                self.dead.set_result(error)
            raise error
        if isinstance(message, SwapWeights):
            return Swapped(version=message.update.version, stage_ms=0.0, gap_ms=0.0)
        return TokensScored(logprobs=[])


UPDATE = WeightUpdate(version=3, tensors=(), num_bytes=0, checksum=0, transport="", location="")


def process_of(*dies: bool, on_restart=lambda *_: None) -> tuple[TeacherProcess, list[str]]:
    """The process, and the names of the workers that were launched for it."""
    names: list[str] = []

    async def launch(name: str, module: str):
        names.append(name)
        return MortalWorker(dies=dies[len(names) - 1])

    worker_pool = WorkerPool(launch, on_restart=on_restart)  # pyright: ignore[reportArgumentType]

    start = StartTeacher(config={}, settings={}, device="cpu", model_path="m")
    process = TeacherProcess("t", start=start, worker_pool=worker_pool, start_timeout_s=1)
    return process, names


async def test_request_is_repeated_after_a_lost_teacher_is_restarted():
    process, names = process_of(True, False)
    await process.start()
    assert await process.score([], timeout_s=5) == []
    assert names == ["t-0"] * 2
    assert process.num_lost == 1


async def test_request_that_kills_the_process_twice_fails_its_group():
    process, _ = process_of(True, True, False)
    await process.start()
    with pytest.raises(ScoreError, match="lost its process twice"):
        await process.score([], timeout_s=5)


async def test_restarted_self_teacher_loads_the_version_that_was_on_its_way():
    process, names = process_of(True, False)
    await process.start()
    assert await process.swap(UPDATE) == 3
    assert names == ["t-0"] * 2


async def test_swap_returns_although_both_processes_die():
    process, names = process_of(True, True, False)
    await process.start()
    assert await process.swap(UPDATE) == 3
    assert await process.score([], timeout_s=5) == []
    assert names == ["t-0"] * 3


async def test_every_lost_process_is_counted_and_reported():
    reports: list[str] = []
    process, _ = process_of(
        True, True, False, on_restart=lambda name, reason: reports.append(f"{name}: {reason}")
    )
    await process.start()
    with pytest.raises(ScoreError):
        await process.score([], timeout_s=5)
    for _ in range(5):  # turns of the loop: the supervising task sees the second death
        await asyncio.sleep(0)
    assert reports == ["t-0: Worker 't' died. It is being restarted."] * 2
    assert process.num_lost == 2
