"""The trainer's end of a transport, by name, and what "auto" is."""

import socket
from pathlib import Path

import torch

from millrace.core.errors import ConfigError
from millrace.weights.send_backend import PackingSender, Payload, SendBackend
from millrace.weights.transports.collective import CollectiveSendBackend
from millrace.weights.transports.disk import DiskSendBackend
from millrace.weights.transports.ipc import IpcSendBackend
from millrace.weights.transports.shm import ShmSendBackend


def resolve_transport(
    transport: str, *, device: torch.device, engine_device: str, is_one_host: bool
) -> str:
    """What "auto" means; other names are themselves.

    The trainer's process decides, and every update says by what it comes: an engine that was told
    "auto" follows. `device` is the trainer's own; `engine_device` is the setting, and its "auto"
    ends up on a GPU where the trainer's did, because on one host both see the same ones.
    """
    if transport != "auto":
        return transport
    if not is_one_host:
        return "collective"
    on_gpus = device.type == "cuda" and engine_device != "cpu"
    return "ipc" if on_gpus else "shm"


def resolve_address(address: str, *, is_one_host: bool, cluster_address: str) -> str:
    """What "auto" means: loopback, or the host at which the controller is reached."""
    if address != "auto":
        return address
    if is_one_host:
        return "127.0.0.1"
    # "tcp://HOST:PORT", or a host alone if it is the advertised one.
    host = cluster_address.removeprefix("tcp://")
    host = host.rpartition(":")[0] if cluster_address.startswith("tcp://") else host
    return socket.gethostname() if host in ("*", "0.0.0.0", "[::]") else host.strip("[]")


def make_sender(
    transport: str,
    *,
    dtype: torch.dtype,
    payload: Payload = "full",
    directory: Path | None = None,
    address: str = "127.0.0.1",
    num_engines: int = 1,
    bucket_bytes: int = 2**26,
    timeout_s: float = 60.0,
    device: torch.device | None = None,
) -> PackingSender:
    """Floating-point weights travel as `dtype`.

    disk needs `directory`; collective is told where to listen, how many engines to wait for, and
    on which `device` the weights are sent (the host's memory if not given).
    """
    outlet: SendBackend
    match transport:
        case "shm":
            outlet = ShmSendBackend()
        case "disk":
            assert directory is not None
            outlet = DiskSendBackend(directory)
        case "collective":
            outlet = CollectiveSendBackend(
                address=address,
                num_engines=num_engines,
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                device=device or torch.device("cpu"),
            )
        case "ipc":
            outlet = IpcSendBackend()
        case _:
            raise ConfigError(
                f"weights.transport = {transport!r} is not known; use 'auto', 'shm', 'disk',"
                " 'collective' or 'ipc'."
            )
    return PackingSender(outlet, dtype=dtype, payload=payload)
