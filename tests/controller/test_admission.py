import asyncio

import pytest
from fakes import FakeClock

from millrace.controller.admission import RUNNING, STALENESS, Admission
from millrace.core.staleness import StalenessLimit


def make_admission(**changes):
    settings = {"groups_per_step": 2, "max_running": 100, "version": 0}
    limit = {"max_staleness": 1}
    for key in ("max_staleness", "measure", "max_stale_share", "only_at_take"):
        limit |= {key: changes.pop(key)} if key in changes else {}
    return Admission(**{**settings, **changes}, limit=StalenessLimit(**limit))


async def count_admitted(admission):
    """How many groups may start right now."""
    count = 0
    while True:
        entering = asyncio.create_task(admission.enter())
        await asyncio.sleep(0)
        if not entering.done():
            entering.cancel()
            return count
        count += 1


async def test_admits_groups_that_can_be_trained_within_the_staleness_limit():
    admission = make_admission(groups_per_step=3, max_staleness=2)
    assert await count_admitted(admission) == 9
    assert admission.held_by == STALENESS


async def test_staleness_zero_admits_exactly_one_batch_per_visible_version():
    admission = make_admission(max_staleness=0)
    assert await count_admitted(admission) == 2
    admission.leave()
    admission.leave()
    assert await count_admitted(admission) == 0
    admission.advance(1)
    assert await count_admitted(admission) == 2


async def test_max_running_bounds_what_is_in_flight():
    admission = make_admission(max_staleness=10, max_running=3)
    assert await count_admitted(admission) == 3
    assert admission.held_by == RUNNING
    admission.leave()
    assert await count_admitted(admission) == 1


async def test_dropped_group_frees_its_place():
    admission = make_admission(max_staleness=0)
    await count_admitted(admission)
    admission.leave()
    admission.give_back()
    assert await count_admitted(admission) == 1


async def test_resumed_run_counts_earlier_batches_as_trained():
    admission = make_admission(version=5)
    assert await count_admitted(admission) == 4


async def test_enter_wakes_when_the_swap_lands():
    admission = make_admission(max_staleness=0)
    await count_admitted(admission)
    waiting = asyncio.create_task(admission.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.advance(1)
    await waiting
    assert admission.held_by is None


async def test_no_group_starts_whose_first_token_would_be_too_stale_for_the_next_take():
    admission = make_admission(max_staleness=1)
    admission.take_next(2)
    assert await count_admitted(admission) == 0
    assert admission.held_by == STALENESS
    admission.advance(1)
    assert await count_admitted(admission) == 6


@pytest.mark.parametrize("measure", ["mean", "share"])
async def test_stale_first_token_is_no_obstacle_if_later_tokens_can_outweigh_it(measure):
    admission = make_admission(max_staleness=1, measure=measure, max_stale_share=0.5)
    admission.take_next(2)
    assert await count_admitted(admission) == 4


async def test_replayed_group_takes_the_place_of_a_new_one():
    admission = make_admission(groups_per_step=4, max_staleness=0)
    await count_admitted(admission)
    admission.replay(1)
    admission.advance(1)
    assert await count_admitted(admission) == 3


async def test_time_without_a_start_is_counted_by_reason():
    clock = FakeClock()
    admission = make_admission(max_staleness=0, now=clock.now)
    await count_admitted(admission)
    waiting = asyncio.create_task(admission.enter())
    await asyncio.sleep(0)
    await clock.sleep(3.0)
    admission.advance(1)
    await waiting
    assert admission.held_s[STALENESS] == 3.0


async def test_limit_at_take_alone_does_not_gate_admission():
    admission = make_admission(max_staleness=0, only_at_take=True, max_running=7)
    admission.take_next(5)  # the engines are five versions behind
    assert await count_admitted(admission) == 7
    assert admission.held_by == RUNNING
