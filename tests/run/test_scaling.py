import asyncio
import socket

import pytest

from millrace.core.errors import ConfigError
from millrace.run.scaling import CONTROL, ask, scaling_server


class FakeWorkers:
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
    workers, pointer = FakeWorkers(), tmp_path / CONTROL
    async with scaling_server(workers, pointer=pointer, private=tmp_path, warn=pytest.fail):  # pyright: ignore
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


async def test_run_continues_without_a_socket_if_its_path_is_too_long(tmp_path):
    private, message = tmp_path / ("long" * 30), []
    workers, pointer = FakeWorkers(), tmp_path / CONTROL
    async with scaling_server(workers, pointer=pointer, private=private, warn=message.append):  # pyright: ignore
        assert not pointer.exists()
    (sentence,) = message
    assert "set TMPDIR to a shorter folder" in sentence
