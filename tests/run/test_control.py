import asyncio
import socket

import pytest

from millrace.core.errors import ConfigError
from millrace.run.scaling import CONTROL, ask, controlled


class FakeCrew:
    def __init__(self) -> None:
        self.engine_names = ["engine-0"]

    async def add_engine(self) -> None:
        self.engine_names.append(f"engine-{len(self.engine_names)}")

    async def remove_engine(self, name: str) -> None:
        if name not in self.engine_names:
            raise ConfigError(f"The run has no engine {name!r}.")
        self.engine_names.remove(name)


@pytest.fixture
async def run_dir(tmp_path):
    crew, pointer = FakeCrew(), tmp_path / CONTROL
    async with controlled(crew, pointer=pointer, private=tmp_path, warn=pytest.fail):  # pyright: ignore
        yield tmp_path
    assert not (tmp_path / CONTROL).exists()


async def test_engines_are_added_and_removed_and_told(run_dir):
    assert await asyncio.to_thread(ask, run_dir) == ["engine-0"]
    assert await asyncio.to_thread(ask, run_dir, add=2) == ["engine-0", "engine-1", "engine-2"]
    left = await asyncio.to_thread(ask, run_dir, remove=("engine-0", "engine-2"))
    assert left == ["engine-1"]


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [({"add": -1}, "--add -1 is not"), ({"remove": ("engine-7",)}, "no engine 'engine-7'")],
)
async def test_what_cannot_be_done_is_one_sentence(run_dir, wish, sentence):
    with pytest.raises(ConfigError, match=sentence):
        await asyncio.to_thread(ask, run_dir, **wish)


@pytest.mark.parametrize(
    "noise", [b"", b"hello\n", b"\xff\x00\n", b"x" * 200_000, b'{"add": "1"}\n']
)
async def test_noise_costs_an_answer_at_most(run_dir, noise):
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


def test_a_run_that_is_over_is_told_from_one_that_goes_on(tmp_path):
    with pytest.raises(ConfigError, match="No run goes on in"):
        ask(tmp_path)
    (tmp_path / CONTROL).write_text(f"{tmp_path}/nobody-listens\n")
    with pytest.raises(ConfigError, match="No run goes on in"):
        ask(tmp_path)


async def test_a_run_whose_socket_would_have_too_long_a_path_goes_on_without_it(tmp_path):
    private, said = tmp_path / ("long" * 30), []
    crew, pointer = FakeCrew(), tmp_path / CONTROL
    async with controlled(crew, pointer=pointer, private=private, warn=said.append):  # pyright: ignore
        assert not pointer.exists()
    (sentence,) = said
    assert "set TMPDIR to a shorter folder" in sentence
