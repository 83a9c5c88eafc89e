"""What the buffer promises with every GroupOrder. Subclass OrderContract and provide `order`."""

import asyncio
from dataclasses import dataclass, field

import pytest
from fakes import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.controller.buffer import Buffer
from millrace.core.protocols import GroupOrder
from millrace.core.staleness import BufferedGroup, StalenessLimit, TokenVersions

VERSION = 6  # of the trainer
ANY_AGE = StalenessLimit(max_staleness=VERSION)

limits = st.one_of(
    st.builds(StalenessLimit, max_staleness=st.integers(0, 4), measure=st.just("oldest")),
    st.builds(StalenessLimit, max_staleness=st.integers(0, 4), measure=st.just("mean")),
    st.builds(
        StalenessLimit,
        max_staleness=st.integers(0, 4),
        measure=st.just("share"),
        max_stale_share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    ),
)
# The versions of the four tokens of each rollout of a group.
stamped = st.lists(st.integers(0, VERSION), min_size=4, max_size=4)


@dataclass
class Bench:
    """A buffer, and the numbers of what it dropped."""

    order: GroupOrder
    limit: StalenessLimit = ANY_AGE
    capacity: int = 30
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = Buffer(
            capacity=self.capacity,
            limit=self.limit,
            order=self.order,
            on_drop=lambda waiting: self.dropped.append(waiting.group.number),
        )

    async def take(self, n: int, *, version: int = VERSION) -> list[int]:
        return [group.number for group in await self.buffer.take(n, version=version)]


class OrderContract:
    @pytest.fixture(scope="class")
    @classmethod
    def order(cls) -> GroupOrder:
        raise NotImplementedError

    @settings(deadline=None)
    @given(groups=st.lists(stamped, min_size=1, max_size=9), limit=limits, n=st.integers(1, 3))
    def test_every_group_is_taken_once_while_the_limit_allows_it_or_dropped(
        self, order, groups, limit, n
    ):
        async def scenario():
            bench = Bench(order, limit)
            for number, versions in enumerate(groups):
                await bench.buffer.admit(make_group(number, versions=versions))
            fit = {
                number
                for number, versions in enumerate(groups)
                if limit.allows(
                    TokenVersions.of_group(make_group(0, versions=versions)), version=VERSION
                )
            }
            taken = []
            for _ in range(len(fit) // n):
                taken += await bench.take(n)
            assert len(set(taken)) == len(taken) == len(fit) // n * n
            assert set(taken) <= fit
            if taken:
                assert sorted(bench.dropped) == sorted(set(range(len(groups))) - fit)
                assert bench.buffer.depth == len(fit) - len(taken)

        asyncio.run(scenario())

    async def test_what_grew_too_stale_while_it_waited_is_dropped_once_and_refilled(self, order):
        bench = Bench(order, StalenessLimit(max_staleness=1), capacity=2)
        for number in (0, 1):
            await bench.buffer.admit(make_group(number, versions=0))
        admitting = [
            asyncio.create_task(bench.buffer.admit(make_group(n, versions=2))) for n in (2, 3)
        ]
        assert sorted(await bench.take(2, version=2)) == [2, 3]
        await asyncio.gather(*admitting)
        assert sorted(bench.dropped) == [0, 1]

    async def test_the_buffer_stays_bounded(self, order):
        bench = Bench(order, capacity=2)
        for number in (0, 1):
            await bench.buffer.admit(make_group(number))
        third = asyncio.create_task(bench.buffer.admit(make_group(2)))
        await asyncio.sleep(0.01)
        assert not third.done()
        await bench.take(1)
        await third
        assert bench.buffer.depth == 2

    async def test_a_cancelled_take_takes_nothing(self, order):
        bench = Bench(order)
        await bench.buffer.admit(make_group(0))
        waiting = asyncio.create_task(bench.take(2))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await bench.take(1) == [0]

    @settings(deadline=None)
    @given(groups=st.lists(stamped, min_size=1, max_size=9), n=st.integers(1, 9))
    def test_the_same_groups_give_the_same_choice_of_different_ones(self, order, groups, n):
        waiting = tuple(
            BufferedGroup(group=group, token_versions=TokenVersions.of_group(group))
            for group in (make_group(i, versions=versions) for i, versions in enumerate(groups))
        )
        n = min(n, len(waiting))
        chosen = list(order.choose(waiting, n, version=VERSION))
        assert chosen == list(order.choose(waiting, n, version=VERSION))
        assert len(set(chosen)) == n
        assert set(chosen) <= set(range(len(waiting)))

    def test_it_needs_a_batch_at_least_and_no_less_for_a_larger_one(self, order):
        needed = [order.num_needed(n) for n in range(1, 20)]
        assert all(number >= n for n, number in enumerate(needed, start=1))
        assert needed == sorted(needed)
