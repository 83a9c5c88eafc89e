import socket

import pytest

from millrace.cluster import address as addresses
from millrace.core.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "bound"),
    [
        ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5000"),
        ("tcp://localhost:0", "tcp://127.0.0.1:*"),
        ("tcp://*:5000", "tcp://0.0.0.0:5000"),
        ("tcp://0.0.0.0:*", "tcp://0.0.0.0:*"),
        ("tcp://[::1]:5000", "tcp://[::1]:5000"),
    ],
)
def test_address_is_bound_in_numeric_form(written: str, bound: str):
    assert addresses.to_bind(written) == bound


@pytest.mark.parametrize(
    "address",
    [
        *("", "ipc:///tmp/x", "localhost:5000", "tcp://127.0.0.1", "tcp://:5000", "tcp://h:-1"),
        *("tcp://h:99999", "tcp://::1:5000", "tcp://h:5000/x", "tcp://h:5000\n"),
    ],
)
def test_invalid_address_is_refused(address: str):
    with pytest.raises(ConfigError, match="is not an address; write 'auto' or 'tcp://HOST:PORT'"):
        addresses.to_bind(address)


def test_workers_on_this_host_reach_a_hub_on_all_interfaces_by_loopback():
    assert addresses.local("tcp://0.0.0.0:5000") == "tcp://127.0.0.1:5000"
    assert addresses.local("tcp://[::]:5000") == "tcp://[::1]:5000"
    assert addresses.local("tcp://10.1.2.3:5000") == "tcp://10.1.2.3:5000"


@pytest.mark.parametrize(
    ("bound", "host", "advertised"),
    [
        ("tcp://10.1.2.3:5000", None, "tcp://10.1.2.3:5000"),
        ("tcp://0.0.0.0:5000", None, f"tcp://{socket.gethostname()}:5000"),
        ("tcp://[::]:5000", None, f"tcp://{socket.gethostname()}:5000"),
        ("tcp://0.0.0.0:5000", "gpu-7", "tcp://gpu-7:5000"),
        ("tcp://0.0.0.0:5000", "fd00::2", "tcp://[fd00::2]:5000"),
        ("tcp://0.0.0.0:5000", "[fd00::2]", "tcp://[fd00::2]:5000"),
    ],
)
def test_advertised_address_has_the_name_of_this_host(bound, host, advertised):
    assert addresses.advertised(bound, host=host) == advertised
