import asyncio
import contextlib

from millrace.environments.rollouts.turn_barrier import TurnBarrier


class Rounds:
    """Turns in the order in which they started, by round."""

    def __init__(self, *, stall_s: float = 60.0) -> None:
        self.started: list[list[tuple[int, int, int]]] = []
        self.warnings: list[str] = []
        self.barrier = TurnBarrier(self._together, warn=self.warnings.append, stall_s=stall_s)

    @contextlib.asynccontextmanager
    async def _together(self):
        await asyncio.sleep(0)  # as engines are paused
        self.started.append([])
        yield

    async def turn(self, group: int, index: int, call: int, *, answer_s: float = 0.0) -> None:
        async with self.barrier.turn(group, index, call):
            self.started[-1].append((group, index, call))
            await asyncio.sleep(answer_s)

    async def play(self, group: int, index: int, delays: list[float], **turn: float) -> None:
        with self.barrier.episode(group, index):
            for call, delay_s in enumerate(delays):
                await asyncio.sleep(delay_s)
                await self.turn(group, index, call, **turn)


async def test_a_round_has_one_turn_of_each_episode_in_order():
    rounds = Rounds()
    await asyncio.gather(
        rounds.play(2, 0, [0.0, 0.03], answer_s=0.01),
        rounds.play(1, 1, [0.02, 0.0, 0.0]),
        rounds.play(1, 0, [0.03]),
    )
    assert rounds.started == [
        [(1, 0, 0), (1, 1, 0), (2, 0, 0)],
        [(1, 1, 1), (2, 0, 1)],
        [(1, 1, 2)],
    ]
    assert not rounds.warnings


async def test_concurrent_turns_of_an_episode_start_in_separate_rounds():
    rounds = Rounds()
    with rounds.barrier.episode(1, 0):
        await asyncio.gather(rounds.play(1, 1, [0.01]), rounds.turn(1, 0, 1), rounds.turn(1, 0, 0))
    assert rounds.started == [[(1, 0, 0), (1, 1, 0)], [(1, 0, 1)]]


async def test_a_round_waits_for_an_episode_that_begins_while_it_starts():
    rounds = Rounds()
    await asyncio.gather(rounds.turn(1, 0, 0), rounds.play(1, 1, [0.01]))
    assert rounds.started == [[], [(1, 0, 0), (1, 1, 0)]]


async def test_an_episode_that_ends_or_gives_up_a_turn_does_not_stop_the_others():
    rounds = Rounds()
    with rounds.barrier.episode(1, 1):
        others = asyncio.gather(rounds.play(1, 0, [0.0]), rounds.play(1, 2, [0.05]))
        given_up = asyncio.create_task(rounds.turn(1, 1, 0))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.1)
        assert rounds.started == []  # it has not asked again
    await others
    assert rounds.started == [[(1, 0, 0), (1, 2, 0)]]


async def test_episodes_that_wait_for_each_other_go_on_with_a_warning():
    rounds, place = Rounds(stall_s=0.05), asyncio.Semaphore(1)

    async def wait_for_a_place(index: int) -> None:
        with rounds.barrier.episode(1, index):
            async with place:
                await rounds.turn(1, index, 0)

    await asyncio.gather(*map(wait_for_a_place, range(3)))
    assert [turn for started in rounds.started for turn in started] == [
        (1, index, 0) for index in range(3)
    ]
    (warning,) = rounds.warnings
    assert "1 episodes waited for the next turn of 2 others" in warning


async def test_engines_that_are_lost_at_the_start_of_a_round_fail_its_episodes():
    rounds = Rounds()

    @contextlib.asynccontextmanager
    async def broken():
        raise RuntimeError("lost")
        yield

    rounds.barrier.together = broken
    ends = await asyncio.gather(
        rounds.play(1, 0, [0.0]), rounds.play(1, 1, [0.0]), return_exceptions=True
    )
    assert [str(end) for end in ends] == ["lost", "lost"]
