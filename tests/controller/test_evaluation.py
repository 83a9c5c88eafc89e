import asyncio
import itertools
from dataclasses import replace

import pytest
from fakes import make_group
from hypothesis import given
from hypothesis import strategies as st

from millrace.controller.evaluation import EvalProgress, evaluate, pass_at
from millrace.core.errors import ScoreError
from millrace.core.records import Score, Task


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_solved_one(samples, data):
    solved = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(itertools.combinations([True] * solved + [False] * (samples - solved), k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at(k, samples=samples, solved=solved) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at(1, samples=4, solved=1) == 0.25
    assert pass_at(2, samples=4, solved=1) == pytest.approx(1 - (3 / 4) * (2 / 3))
    assert pass_at(2, samples=4, solved=3) == 1.0
    assert pass_at(4, samples=4, solved=0) == 0.0
    assert pass_at(1000, samples=100_000, solved=1) == pytest.approx(0.01)


async def examine(solved: dict[int, list[float]], *, samples: int, num_tasks: int):
    """Tasks that `solved` does not name fail."""

    async def play(task, number):
        group = make_group(number, size=samples, versions=[3, 3, 4, 4 + number])
        return replace(group, task=task)

    async def score(group):
        if group.number not in solved:
            raise ScoreError("no")
        totals = solved[group.number]
        return replace(group, scores=tuple(Score(total=total, parts={}) for total in totals))

    tasks = [Task(prompt=str(number)) for number in range(num_tasks)]
    return await evaluate(
        tasks,
        samples=samples,
        progress=EvalProgress(step=9, num_tasks=num_tasks),
        play=play,
        score=score,
        solved_at=1.0,
        max_running=2,
    )


async def test_accuracy_counts_failed_tasks_as_not_solved():
    result = await examine({0: [0.0], 1: [1.0], 3: [1.0], 4: [0.0]}, samples=1, num_tasks=5)
    assert result.accuracy == 2 / 5
    assert result.num_failed == 1
    assert [group.number for group in result.groups] == [0, 1, 3, 4]
    assert result.pass_at == {1: 2 / 5}


async def test_several_samples_give_mean_at_k_and_pass_at_k():
    result = await examine(
        {0: [1.0, 0.0, 0.0], 1: [1.0, 1.0, 1.0], 2: [0.5, 0.9, 0.0]}, samples=3, num_tasks=4
    )
    assert result.accuracy == 4 / 12
    assert result.pass_at == {
        1: pytest.approx(4 / 12),
        2: pytest.approx((2 / 3 + 1) / 4),
        3: pytest.approx(2 / 4),
    }
    metrics = result.metrics()
    assert metrics["eval/mean@3"] == metrics["eval/accuracy"] == 4 / 12
    assert metrics["eval/pass@3"] == 0.5
    assert metrics["eval/step"] == 9


async def test_evaluation_counts_tokens_by_version():
    result = await examine({0: [0.0, 1.0], 1: [1.0, 1.0]}, samples=2, num_tasks=2)
    assert result.versions == {3: 8, 4: 6, 5: 2}
    assert result.versions == {3: 8, 4: 6, 5: 2}
    metrics = result.metrics()
    assert (metrics["eval/version_min"], metrics["eval/version_max"]) == (3, 5)


async def test_tasks_without_a_score_in_time_are_counted():
    asked, given_up = [], []

    async def play(task, number):
        return replace(make_group(number, size=1), task=task)

    async def score(group):
        asked.append(group.number)
        if group.number == 0:
            return replace(group, scores=(Score(total=1.0, parts={}),))
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(group.number)

    progress = EvalProgress(step=9, num_tasks=5)
    result = await evaluate(
        [Task(prompt=str(number)) for number in range(5)],
        samples=1,
        progress=progress,
        play=play,
        score=score,  # pyright: ignore[reportArgumentType]
        solved_at=1.0,
        max_running=2,
        score_timeout_s=0.05,
    )
    await asyncio.sleep(0)
    assert (result.num_failed, result.num_unscored, result.accuracy) == (4, 4, 1 / 5)
    assert result.metrics()["eval/unscored"] == 4
    assert asked == [0, 1, 2], "once no scorer answers, none is called"
    assert sorted(given_up) == [1, 2]
    assert str(progress) == "the evaluation of step 9 has generated 5 of 5 tasks and scored 5."
