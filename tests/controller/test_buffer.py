import asyncio

import pytest
from fakes import FakeClock, make_group

from millrace.controller.buffer import Buffer
from millrace.controller.orders import build_sampler
from millrace.core.errors import RunFailed
from millrace.core.staleness import StalenessLimit


def make_buffer(
    *, capacity=4, max_staleness=1, measure="oldest", share=0.0, sampler=None, **settings
):
    dropped = []
    limit = StalenessLimit(max_staleness=max_staleness, measure=measure, max_stale_share=share)
    buffer = Buffer(
        capacity=capacity,
        limit=limit,
        sampler=sampler or build_sampler({"type": "ready"}),
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

    buffer, _ = make_buffer(sampler=Wrong())
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
