import contextlib
from typing import Any

import pytest
import torch
from engine_rig import make_engine
from queue_link import FakeLink

from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.spans import Timeline
from millrace.inference.worker import wire
from millrace.training.build import build_sender
from millrace.weights.transport import listening_address, resolve_transport, staging_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
SHM = {"transport": "shm"}


@pytest.mark.parametrize(
    ("device", "engine_device", "is_one_host", "transport"),
    [
        (CPU, CPU, True, "shm"),
        (CPU, GPU, True, "shm"),
        (GPU, CPU, True, "shm"),
        (GPU, GPU, True, "ipc"),
        (GPU, torch.device("cuda"), True, "ipc"),
        (GPU, GPU, False, "collective"),
        (CPU, CPU, False, "collective"),
    ],
)
def test_auto_transport_depends_on_hosts_and_devices(
    device: torch.device, engine_device: torch.device, is_one_host: bool, transport: str
):
    found = resolve_transport(
        "auto", device=device, engine_device=engine_device, is_one_host=is_one_host
    )
    assert found == transport


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match=r"'weights\.transport' = 'pigeon'"):
        load_config({"model": "m", "weights": {"transport": "pigeon"}})


def test_explicit_transport_is_kept():
    assert resolve_transport("disk", device=GPU, engine_device=GPU, is_one_host=True) == "disk"


@pytest.mark.parametrize(
    ("engines", "dtype"),
    [("cpu", torch.float32), ("cuda:0", torch.bfloat16), (["cuda", "cuda:1"], torch.bfloat16)],
)
def test_trainer_on_a_cpu_sends_what_its_engines_compute_in(
    engines: str | list[str], dtype: torch.dtype
):
    config = load_config(
        {"model": "m", "placement": {"trainer": "cpu", "engines": engines}, "weights": SHM}
    )
    sender = build_sender(config)
    assert sender.dtype is dtype
    sender.close()


@pytest.mark.parametrize(
    ("hosts", "transport"),
    [
        ({}, "shm"),
        ({"engine": {"remote": 1}, "cluster": {"advertise": "127.0.0.1"}}, "collective"),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_of_servers_on_gpus_travel_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, hosts: dict[str, Any], transport: str
):
    """The GPUs here are only names, so memory on one of them would be an error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = load_config(
        {
            "model": "m",
            "placement": {"trainer": "cuda:0", "engines": "cuda:1"},
            **hosts,
            "engine": {"type": kind, **hosts.get("engine", {})},
        }
    )
    engine = make_engine()
    link: Any = FakeLink()
    with contextlib.closing(build_sender(config)) as sender:
        weights = {name: torch.ones(s) for name, s in engine.parameter_shapes().items()}
        update = sender.publish(1, weights)
        assert (update.transport, sender.dtype) == (transport, torch.bfloat16)
        wire(engine, config, link=link, timeline=Timeline("engine-0"))


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


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "cuda"),
        ({"cluster": {"share_gpu": "take_turns"}}, "cuda"),
        ({"cluster": {"share_gpu": "sleep"}}, "cpu"),
        ({"cluster": {"share_gpu": "sleep"}, "weights": {"transport": "ipc"}}, "cuda"),
        ({"engine": {"type": "vllm"}}, "cpu"),
    ],
)
def test_weights_wait_in_host_memory_where_gpus_have_no_room_for_them(
    sections: dict[str, Any], expected: str
):
    config = load_config({"model": "m", **sections})
    staged_on = staging_device(config, GPU)
    assert staged_on.type == expected
    on_gpu = {"cuda": "ipc", "cpu": "shm"}
    transport = resolve_transport("auto", device=GPU, engine_device=staged_on, is_one_host=True)
    assert transport == on_gpu[expected]
