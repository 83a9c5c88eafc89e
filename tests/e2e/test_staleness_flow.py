"""Admission, cancellation, buffer and replay together: the learner never starves, and never gets a
group beyond the limit. Engines and trainer are simulated by turns of the event loop."""

import asyncio
import random
from contextlib import nullcontext, suppress

import pytest
from controller_rig import make_dispatcher, make_tracker
from fakes import FakeScorers, make_completion, make_group

from millrace.controller.admission import Admission
from millrace.controller.buffer import Buffer, ReplayBuffer
from millrace.controller.orders import ORDERS, build_group_order, check_room
from millrace.core.errors import ConfigError
from millrace.core.staleness import StalenessLimit, TokenVersions
from millrace.environments.rollouts.partial_rollouts import Expired

STEPS, GROUPS, CAPACITY = 25, 3, 12
LIMITS = [
    StalenessLimit(max_staleness=1),
    StalenessLimit(max_staleness=2, measure="mean"),
    StalenessLimit(max_staleness=1, measure="share", max_stale_share=0.3),
]


class Flow(FakeScorers):
    def __init__(self, *, order, limit, step_turns, per_batch_replayed=0):
        self.limit = limit
        self.visible = 0  # the version engines sample with
        self.expired_before = 0
        self.step_turns = step_turns
        self.draws = random.Random(0)
        self.num_dropped = 0
        self.admission = Admission(groups_per_step=GROUPS, limit=limit, max_running=8, version=0)
        self.tracker = make_tracker(self.admission, warn=pytest.fail)
        self.buffer = Buffer(
            capacity=CAPACITY,
            limit=limit,
            order=build_group_order({"type": order}),
            on_drop=self.drop,
        )
        self.dispatcher = make_dispatcher(
            self.tracker,
            player=self,
            scorers=self,
            buffer=self.buffer,
            engines=self,
        )
        if order == "in_order":
            self.buffer.is_preceded = self.dispatcher.is_awaited
        if limit.waits:
            # Patient: one turn of the event loop takes microseconds.
            self.buffer.running = lambda: [
                group._replace(age_s=20.0) for group in self.dispatcher.running()
            ]
            self.buffer.steps = STEPS
        looser = StalenessLimit(max_staleness=6)
        self.replay = ReplayBuffer(per_batch=per_batch_replayed, capacity=9, limit=looser, seed=0)

    def drop(self, waiting):
        self.num_dropped += 1
        self.tracker.expired_in_buffer(waiting)

    async def play_for_training(self, task, *, attempt, group_size, scoring):
        versions = []
        for _ in range(self.draws.choice([2, 2, 3, 12])):
            versions.append(self.visible)
            await asyncio.sleep(0)
            if min(versions) < self.expired_before:  # as an engine does
                attempt.record([make_completion("x" * len(versions))])
                raise Expired
        group = make_group(attempt.number, versions=versions, sampled_tokens=len(versions), size=1)
        attempt.record([make_completion("x" * len(versions))])
        return group

    async def score(self, group, scoring):
        await asyncio.sleep(0)
        return group

    async def expire(self, before, adapters=None):
        """In place of the engines."""
        self.expired_before = before

    async def next_batch(self, version):
        await self.dispatcher.expire(version)
        again = self.replay.draw(version)
        self.admission.replay(len(again))
        fresh = await self.buffer.take(GROUPS - len(again), version=version)
        for group in fresh:
            assert self.limit.allows(TokenVersions.of_group(group), version=version)
        return fresh, again

    async def learn(self):
        trained, replayed = [], []
        upcoming = asyncio.create_task(self.next_batch(0))
        for version in range(STEPS):
            fresh, again = await upcoming
            if version + 1 < STEPS:
                upcoming = asyncio.create_task(self.next_batch(version + 1))
            for _ in range(self.step_turns):
                await asyncio.sleep(0)
            trained += [group.number for group in fresh]
            replayed += [group.number for group in again]
            self.tracker.trained(group.number for group in fresh)
            self.replay.keep(fresh)
            self.visible = version + 1
            self.admission.advance(version + 1)
        return trained, replayed

    async def run(self):
        dispatching = asyncio.create_task(self.dispatcher.run())
        try:
            return await asyncio.wait_for(self.learn(), 20)
        finally:
            dispatching.cancel()
            with suppress(asyncio.CancelledError):
                await dispatching


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.measure)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step_turns", [0, 20], ids=["fast trainer", "slow trainer"])
async def test_every_step_gets_a_batch_for_every_order_and_limit(order, limit, step_turns):
    flow = Flow(order=order, limit=limit, step_turns=step_turns)
    trained, _ = await flow.run()
    assert len(set(trained)) == len(trained) == STEPS * GROUPS
    given_up = flow.tracker.cancellations.by_reason["waiting"]
    assert given_up >= flow.num_dropped  # some were still waiting to enter the full buffer


async def test_in_order_trains_tasks_in_order_although_some_take_six_times_as_long():
    flow = Flow(order="in_order", limit=StalenessLimit(max_staleness=9), step_turns=3)
    trained, _ = await flow.run()
    assert trained == list(range(STEPS * GROUPS))
    unordered, _ = await Flow(order="ready", limit=flow.limit, step_turns=3).run()
    assert unordered != sorted(unordered)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step_turns", [0, 20], ids=["fast trainer", "slow trainer"])
async def test_no_token_is_wasted_if_batches_wait(order, step_turns):
    limit = StalenessLimit(max_staleness=1, waits=True)
    flow = Flow(order=order, limit=limit, step_turns=step_turns)
    trained, _ = await flow.run()
    assert len(set(trained)) == len(trained) == STEPS * GROUPS
    assert flow.tracker.waste.tokens.total() == 0
    in_flight = 2 * GROUPS  # at the end
    assert set(range(STEPS * GROUPS - in_flight)) <= set(trained)  # slow ones, too


async def test_tokens_are_wasted_if_batches_do_not_wait():
    flow = Flow(order="oldest", limit=StalenessLimit(max_staleness=1), step_turns=0)
    await flow.run()
    assert flow.tracker.waste.tokens.total() > 0


async def test_limit_at_take_alone_wastes_what_admission_would_not_have_started():
    wasted = {}
    for only_at_take in (False, True):
        limit = StalenessLimit(max_staleness=1, only_at_take=only_at_take)
        flow = Flow(order="ready", limit=limit, step_turns=40)
        trained, _ = await flow.run()
        assert len(set(trained)) == len(trained) == STEPS * GROUPS
        cancelled = flow.tracker.cancellations.by_reason
        assert set(cancelled) <= ({"waiting"} if only_at_take else {"generating", "waiting"})
        wasted[only_at_take] = flow.tracker.waste.tokens.total()
    assert wasted[True] > 5 * wasted[False]


async def test_replayed_groups_replace_new_ones():
    flow = Flow(order="oldest", limit=LIMITS[0], step_turns=3, per_batch_replayed=1)
    trained, replayed = await flow.run()
    assert len(set(replayed)) == len(replayed) == STEPS - 2
    assert len(set(trained)) == len(trained) == STEPS * GROUPS - len(replayed)
    assert set(replayed) <= set(trained)
    assert flow.admission._accepted <= (1 + STEPS + 1) * GROUPS


@pytest.mark.parametrize("max_staleness", [2, 3])
async def test_freshest_has_a_choice_exactly_if_it_is_accepted(max_staleness):
    dropped = {}
    for order in ("oldest", "freshest"):
        limit = StalenessLimit(max_staleness=max_staleness)
        flow = Flow(order=order, limit=limit, step_turns=40)
        await flow.run()
        dropped[order] = flow.num_dropped
    table = {"type": "freshest"}
    settings = {"groups_per_step": GROUPS, "capacity": CAPACITY, "limit": limit}
    with nullcontext() if max_staleness == 3 else pytest.raises(ConfigError):
        check_room(table, **settings)
    assert dropped["oldest"] == 0
    assert (dropped["freshest"] > 0) == (max_staleness == 3)  # groups not chosen became too stale
