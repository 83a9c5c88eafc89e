import asyncio
import itertools
import socket

import pytest

from millrace.core.errors import ConfigError
from millrace.run.scaling import (
    CONTROL,
    RETRY_WINDOWS,
    ask,
    change,
    follow_load,
    scaling_server,
)


class FakeWorkers:
    def __init__(self, room: int = 9) -> None:
        self.engine_names = ["engine-0"]
        self.room = room
        self.numbers = itertools.count(1)

    async def add_engine(self) -> str:
        number = next(self.numbers)
        if number >= self.room:
            raise ConfigError("Ray has 0 of 2 CPUs free.")
        await asyncio.sleep(0.01)  # it loads its model
        self.engine_names.append(f"engine-{number}")
        return self.engine_names[-1]

    async def remove_engine(self, name: str) -> None:
        if name not in self.engine_names:
            raise ConfigError(f"The run has no engine {name!r}.")
        if len(self.engine_names) == 1:
            raise ConfigError(f"{name!r} is the last engine of the run; add another first.")
        self.engine_names.remove(name)


@pytest.fixture
async def run_dir(tmp_path):
    workers, pointer = FakeWorkers(), tmp_path / CONTROL
    async with scaling_server(workers, pointer=pointer, private=tmp_path):  # pyright: ignore
        yield tmp_path
    assert not (tmp_path / CONTROL).exists()


async def test_reply_lists_engines_after_adding_and_removing(run_dir):
    assert await asyncio.to_thread(ask, run_dir) == ["engine-0"]
    assert await asyncio.to_thread(ask, run_dir, add=2) == ["engine-0", "engine-1", "engine-2"]
    left = await asyncio.to_thread(ask, run_dir, remove=("engine-0", "engine-2"))
    assert left == ["engine-1"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"add": -1}, "--add -1 is not"), ({"remove": ("engine-7",)}, "no engine 'engine-7'")],
)
async def test_refused_request_is_one_sentence(run_dir, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        await asyncio.to_thread(ask, run_dir, **change)


async def test_reply_to_a_request_that_partly_fails_comes_last_and_lists_the_engines(tmp_path):
    workers, pointer = FakeWorkers(room=3), tmp_path / CONTROL
    async with scaling_server(workers, pointer=pointer, private=tmp_path):  # pyright: ignore
        with pytest.raises(ConfigError) as info:
            await asyncio.to_thread(ask, tmp_path, add=3)
        now = "The engines of the run are now engine-0, engine-1, engine-2."
        assert str(info.value) == f"Ray has 0 of 2 CPUs free. {now}"
        with pytest.raises(ConfigError, match=r"no engine 'x'. The engines .* now engine-2\.$"):
            await asyncio.to_thread(ask, tmp_path, remove=("engine-1", "engine-0", "x"))


@pytest.mark.parametrize(
    "noise", [b"", b"hello\n", b"\xff\x00\n", b"x" * 200_000, b'{"add": "1"}\n']
)
async def test_noise_on_the_socket_does_not_stop_the_server(run_dir, noise):
    def send():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect((run_dir / CONTROL).read_text().strip())
            connection.settimeout(5)
            try:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                return

    await asyncio.to_thread(send)
    assert await asyncio.to_thread(ask, run_dir) == ["engine-0"]


def test_ask_refuses_a_folder_without_an_active_run(tmp_path):
    with pytest.raises(ConfigError, match="No run is active in"):
        ask(tmp_path)
    (tmp_path / CONTROL).write_text(f"{tmp_path}/nobody-listens\n")
    with pytest.raises(ConfigError, match="No run is active in"):
        ask(tmp_path)


@pytest.mark.parametrize(
    ("waits", "surplus", "expected"), [(4, 0, 1), (3, 7, 0), (0, 10, -1), (0, 9, 0), (0, 0, 0)]
)
def test_engines_are_added_if_the_trainer_waits_and_removed_if_batches_do(waits, surplus, expected):
    window = ["trainer waits"] * waits + ["batches wait"] * surplus
    assert change([*window, *["balanced"] * (10 - len(window))]) == expected  # pyright: ignore


async def scaled(
    workers: FakeWorkers, loads, *, most: int = 3, removed: str = ""
) -> tuple[list[int], list[str]]:
    """The number of engines after each of these windows, and what was reported. The user has
    `removed` an engine after the first."""
    counts, reports, windows = [], [], itertools.count()

    def load():
        if (number := next(windows)) > 0:
            counts.append(len(workers.engine_names))
        if number == 1 and removed:
            workers.engine_names.remove(removed)
        if number == len(loads):
            task.cancel()
        return loads[min(number, len(loads) - 1)]

    limits = {"min_engines": 1, "max_engines": most}
    task = asyncio.create_task(
        follow_load(workers, load, **limits, report=reports.append, window_s=0.001)  # pyright: ignore
    )
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    return counts, reports


async def test_autoscaling_stays_between_its_limits():
    counts, reports = await scaled(
        FakeWorkers(), [*["trainer waits"] * 4, *["batches wait"] * 4], most=3
    )
    assert counts == [2, 3, 3, 3, 2, 1, 1, 1]
    assert [report.rpartition(" ")[2] for report in reports] == [
        *("engine.", "engine.", "engine-2.", "engine-1.")
    ]


async def test_autoscaling_without_room_reports_it_and_tries_again_much_later():
    loads = ["trainer waits"] * (2 + RETRY_WINDOWS)
    counts, reports = await scaled(FakeWorkers(room=2), loads[:-2])
    assert {*counts} == {2}
    assert "No engine could be added, so 2 remain: Ray has 0 of 2 CPUs free." in reports
    assert len(reports) == 3
    _, reports = await scaled(FakeWorkers(room=2), loads)
    assert len(reports) == 5


async def test_autoscaling_keeps_as_many_engines_as_the_run_started_with():
    loads = ["trainer waits", *["batches wait"] * 3]
    counts, _ = await scaled(FakeWorkers(), loads, removed="engine-0")
    assert counts == [2, 1, 1, 1]
