import pytest
import torch

from millrace.weights.transport import listening_address, resolve_transport

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "engine_device", "is_one_host", "transport"),
    [
        (CPU, "auto", True, "shm"),
        (CPU, "cpu", True, "shm"),
        (CPU, "cuda", True, "shm"),
        (GPU, "cpu", True, "shm"),
        (GPU, "auto", True, "ipc"),
        (GPU, "cuda:0", True, "ipc"),
        (GPU, "auto", False, "collective"),
        (CPU, "auto", False, "collective"),
    ],
)
def test_auto_transport_depends_on_hosts_and_devices(
    device: torch.device, engine_device: str, is_one_host: bool, transport: str
):
    found = resolve_transport(
        "auto", device=device, engine_device=engine_device, is_one_host=is_one_host
    )
    assert found == transport


def test_explicit_transport_is_kept():
    assert resolve_transport("disk", device=GPU, engine_device="auto", is_one_host=True) == "disk"


@pytest.mark.parametrize(
    ("is_one_host", "cluster_address", "expected"),
    [
        (True, "tcp://10.0.0.1:5000", "127.0.0.1"),
        (False, "tcp://10.0.0.1:5000", "10.0.0.1"),
        (False, "tcp://[fd00::1]:5000", "fd00::1"),
        (False, "trainer.lan", "trainer.lan"),
    ],
)
def test_trainer_listens_where_the_engines_reach_it(
    is_one_host: bool, cluster_address: str, expected: str
):
    assert listening_address(cluster_address, is_one_host=is_one_host) == expected
