import asyncio

import pytest
from fakes import make_group
from hypothesis import given
from hypothesis import strategies as st

from millrace.staging.buffer import Buffer


def make_buffer(*, capacity=4, max_staleness=1):
    dropped = []
    buffer = Buffer(
        capacity=capacity,
        max_staleness=max_staleness,
        on_drop=lambda group: dropped.append(group.number),
    )
    return buffer, dropped


async def test_take_returns_oldest_first():
    buffer, _ = make_buffer()
    for number in (7, 3, 5):
        await buffer.admit(make_group(number))
    assert [g.number for g in await buffer.take(2, version=0)] == [7, 3]
    assert buffer.depth == 1


async def test_take_drops_groups_staler_than_limit_by_their_oldest_token():
    buffer, dropped = make_buffer(max_staleness=1)
    await buffer.admit(make_group(0, versions=[2, 3, 3, 3]))
    await buffer.admit(make_group(1, versions=[3, 3, 4, 4]))
    assert [g.number for g in await buffer.take(1, version=4)] == [1]
    assert dropped == [0]


async def test_take_checks_at_take_because_versions_advance_while_groups_wait():
    buffer, dropped = make_buffer(max_staleness=1)
    await buffer.admit(make_group(0, versions=0))
    waiting = asyncio.create_task(buffer.take(1, version=2))
    await asyncio.sleep(0)
    assert dropped == [0]
    await buffer.admit(make_group(1, versions=1))
    assert [g.number for g in await waiting] == [1]


async def test_admit_waits_while_full_and_goes_on_after_take():
    buffer, _ = make_buffer(capacity=2)
    await buffer.admit(make_group(0))
    await buffer.admit(make_group(1))
    third = asyncio.create_task(buffer.admit(make_group(2)))
    await asyncio.sleep(0.01)
    assert not third.done()
    await buffer.take(1, version=0)
    await third
    assert buffer.depth == 2


async def test_dropping_makes_room_for_a_waiting_admit():
    buffer, dropped = make_buffer(capacity=2, max_staleness=0)
    await buffer.admit(make_group(0, versions=0))
    await buffer.admit(make_group(1, versions=0))
    admitting = [asyncio.create_task(buffer.admit(make_group(n, versions=1))) for n in (2, 3)]
    assert [g.number for g in await buffer.take(2, version=1)] == [2, 3]
    await asyncio.gather(*admitting)
    assert dropped == [0, 1]


async def test_a_cancelled_take_takes_nothing():
    buffer, _ = make_buffer()
    await buffer.admit(make_group(0))
    waiting = asyncio.create_task(buffer.take(2, version=0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [g.number for g in await buffer.take(1, version=0)] == [0]


@given(
    ages=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    max_staleness=st.integers(0, 4),
    n=st.integers(1, 3),
)
def test_every_group_is_taken_once_or_dropped_and_never_taken_stale(ages, max_staleness, n):
    async def scenario():
        version = 6
        buffer, dropped = make_buffer(capacity=20, max_staleness=max_staleness)
        for number, age in enumerate(ages):
            await buffer.admit(make_group(number, versions=version - age))
        taken = []
        while sum(1 for a in ages if a <= max_staleness) - len(taken) >= n:
            taken += [g.number for g in await buffer.take(n, version=version)]
        assert all(ages[number] <= max_staleness for number in taken)
        assert all(ages[number] > max_staleness for number in dropped)
        assert len(set(taken)) == len(taken)
        if taken:
            assert len(taken) + len(dropped) + buffer.depth == len(ages)

    asyncio.run(scenario())
