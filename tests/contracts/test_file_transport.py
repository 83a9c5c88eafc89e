"""A transport that settings name as "module:Class" keeps the transport contract."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transport_contract import TransportContract

from millrace.core.errors import ConfigError
from millrace.core.records import WeightUpdate
from millrace.weights import transport
from millrace.weights.backends import PackingSender, StagingReceiver
from millrace.weights.gathering import WeightSender

FILES = f"{Path(__file__).parents[1] / 'file_transport.py'}:FileTransport"


class TestFiles(TransportContract):
    transport = FILES

    @pytest.fixture
    def make_sender(self, tmp_path: Path) -> Callable[..., PackingSender]:
        def make(dtype: torch.dtype, **arguments) -> PackingSender:
            return transport.make_sender(FILES, dtype=dtype, directory=tmp_path, **arguments)

        return make

    @pytest.fixture
    def make_receiver(self) -> Callable[..., StagingReceiver]:
        return partial(transport.make_receiver, FILES)

    def corrupt(self, sender: WeightSender, update: WeightUpdate) -> None:
        path = Path(update.location)
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)


def test_a_class_that_is_no_transport_is_refused():
    with pytest.raises(ConfigError, match=r"= 'pathlib:Path' is not a Transport;"):
        transport.load_transport("pathlib:Path")
