import asyncio

import pytest
from fakes import FakeClock, make_group

from millrace.controller.buffer import Buffer, RunningGroup
from millrace.controller.orders import build_group_order
from millrace.core.errors import RunFailed
from millrace.core.staleness import StalenessLimit


def make_buffer(
    *, capacity=4, max_staleness=1, measure="oldest", share=0.0, order=None, **settings
):
    dropped = []
    limit = StalenessLimit(max_staleness=max_staleness, measure=measure, max_stale_share=share)
    buffer = Buffer(
        capacity=capacity,
        limit=limit,
        order=order or build_group_order({"type": "ready"}),
        on_drop=lambda waiting: dropped.append(waiting.group.number),
        **settings,
    )
    return buffer, dropped


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        ({"measure": "oldest"}, [1]),  # staleness 1 1 0 0
        ({"measure": "mean"}, [0, 1]),  # of group 0, 2 1 1 0
        ({"measure": "share", "share": 0.25}, [0, 1]),
        ({"measure": "share", "share": 0.24}, [1]),
    ],
)
async def test_take_drops_groups_that_the_measure_rules_out(settings, fit):
    buffer, dropped = make_buffer(**settings)
    await buffer.admit(make_group(0, versions=[2, 3, 3, 4]))
    await buffer.admit(make_group(1, versions=[3, 3, 4, 4]))
    await buffer.admit(make_group(2, versions=[0, 0, 4, 4]))
    assert [g.number for g in await buffer.take(len(fit), version=4)] == fit
    assert dropped == sorted({0, 1, 2} - set(fit))


async def test_take_checks_staleness_again_because_versions_advance_while_groups_wait():
    buffer, dropped = make_buffer(max_staleness=1)
    await buffer.admit(make_group(0, versions=0))
    waiting = asyncio.create_task(buffer.take(1, version=2))
    await asyncio.sleep(0)
    assert dropped == [0]
    await buffer.admit(make_group(1, versions=1))
    assert [g.number for g in await waiting] == [1]


@pytest.mark.parametrize("chosen", [[0], [0, 0], [0, 7], [0, -1]])
async def test_order_that_chooses_unknown_groups_ends_the_run(chosen):
    class Wrong:
        def num_needed(self, n):
            return n

        def choose(self, waiting, n, *, version):
            return chosen

    buffer, _ = make_buffer(order=Wrong())
    for number in range(3):
        await buffer.admit(make_group(number))
    with pytest.raises(RunFailed, match=r"Wrong\.choose returned .* 2 of 3 waiting groups"):
        await buffer.take(2, version=0)
    assert buffer.depth == 3


async def test_time_in_the_buffer_is_measured_by_its_clock():
    clock = FakeClock()
    buffer, _ = make_buffer(now=clock.now)
    await buffer.admit(make_group(0))
    await clock.sleep(4.0)
    await buffer.admit(make_group(1))
    await clock.sleep(2.0)
    await buffer.take(2, version=0)
    assert buffer.wait_s == (6.0 + 2.0) / 2


async def test_in_order_buffer_waits_for_an_earlier_group_on_its_way():
    on_their_way = {0}
    buffer, _ = make_buffer(
        order=build_group_order({"type": "in_order"}),
        is_preceded=lambda number: any(other < number for other in on_their_way),
        capacity=2,
    )
    await buffer.admit(make_group(2))
    await buffer.admit(make_group(1))
    taking = asyncio.create_task(buffer.take(2, version=0))
    await asyncio.sleep(0)
    assert not taking.done()
    await asyncio.wait_for(buffer.admit(make_group(0)), 5)  # although the buffer is full
    on_their_way.clear()
    await buffer.recheck()
    assert [group.number for group in await taking] == [0, 1]


async def test_in_order_buffer_does_not_wait_for_a_group_that_failed():
    on_their_way = {0}
    buffer, _ = make_buffer(
        order=build_group_order({"type": "in_order"}),
        is_preceded=lambda number: any(other < number for other in on_their_way),
    )
    await buffer.admit(make_group(1))
    taking = asyncio.create_task(buffer.take(1, version=0))
    await asyncio.sleep(0)
    assert not taking.done()
    on_their_way.clear()
    await buffer.recheck()
    assert [group.number for group in await taking] == [1]


def make_waiting_buffer(*running, steps=None, **settings):
    """Groups that still run, each with the oldest version of its tokens and its age."""
    on_their_way = {number: RunningGroup(number, *rest) for number, *rest in running}
    buffer, dropped = make_buffer(
        max_staleness=2, running=on_their_way.values, steps=steps, **settings
    )
    return buffer, dropped, on_their_way


async def test_batch_waits_for_a_running_group_that_would_be_too_stale_for_the_next():
    buffer, _, on_their_way = make_waiting_buffer((0, 3, 60.0), capacity=1)
    await buffer.admit(make_group(1, versions=5))
    taking = asyncio.create_task(buffer.take(1, version=5))
    await asyncio.sleep(0)
    assert not taking.done()
    await asyncio.wait_for(buffer.admit(make_group(0, versions=3)), 5)  # although it is full
    on_their_way.clear()
    await buffer.recheck()
    assert [group.number for group in await taking] == [0]


async def test_batch_waits_before_more_groups_are_old_than_the_batches_to_come_can_train():
    # The batch after this one can train group 2 or group 3, and a later one neither.
    buffer, _, on_their_way = make_waiting_buffer((2, 4, 60.0), (3, 4, 60.0))
    await buffer.admit(make_group(0, versions=5))
    taking = asyncio.create_task(buffer.take(1, version=5))
    await asyncio.sleep(0)
    assert not taking.done()
    del on_their_way[3]
    await buffer.admit(make_group(3, versions=4))
    assert [group.number for group in await taking] == [3]


async def test_order_gives_way_before_a_waiting_group_is_lost():
    freshest = build_group_order({"type": "freshest"})
    buffer, dropped, _ = make_waiting_buffer(order=freshest)
    for number, version in enumerate([3, 5, 5]):
        await buffer.admit(make_group(number, versions=version))
    assert [group.number for group in await buffer.take(1, version=5)] == [0]
    assert [group.number for group in await buffer.take(1, version=6)] == [1]
    assert dropped == []


@pytest.mark.parametrize(
    ("oldest", "age_s", "steps"),
    [(4, 60.0, None), (3, 0.01, None), (3, 60.0, 6)],
    ids=["in time for the next", "has run as long as it was waited for", "no step is left for it"],
)
async def test_batch_does_not_wait_without_need(oldest, age_s, steps):
    buffer, _, _ = make_waiting_buffer((0, oldest, age_s), steps=steps)
    await buffer.admit(make_group(1, versions=5))
    taken = await asyncio.wait_for(buffer.take(1, version=5), 5)
    assert [group.number for group in taken] == [1]


@pytest.mark.parametrize("num_turns", range(5))
async def test_take_that_is_cancelled_just_after_a_change_ends(num_turns):
    """`num_turns`: of the event loop, between the two."""
    buffer, _, _ = make_waiting_buffer((0, 3, 60.0))
    await buffer.admit(make_group(1, versions=5))
    taking = asyncio.create_task(buffer.take(1, version=5))
    for _ in range(5):
        await asyncio.sleep(0)
    await buffer.recheck()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    taking.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert taking.cancelled()
    await buffer.admit(make_group(2, versions=5))  # nothing holds its lock
