"""Makes both ends of a transport by its name or class, and resolves "auto".

The trainer decides what "auto" stands for. Every update names its transport, which an engine with
"auto" follows.
"""

import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from millrace.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.plugins import load_reference
from millrace.weights.backends import (
    PackingSender,
    Payload,
    RecvBackend,
    Reference,
    SendBackend,
    StagingReceiver,
    Transport,
)
from millrace.weights.transports.collective import CollectiveRecvBackend, CollectiveSendBackend
from millrace.weights.transports.disk import DiskRecvBackend, DiskSendBackend
from millrace.weights.transports.memory import (
    IpcRecvBackend,
    IpcSendBackend,
    ShmRecvBackend,
    ShmSendBackend,
)
from millrace.weights.transports.rendezvous import ENGINE, EVALUATOR


def staging_device(config: RunConfig, device: torch.device) -> torch.device:
    """Where an engine that computes on `device` stages new weights. Servers read them from files,
    and leave no room on their GPUs; nor does a trainer whose engines sleep during a step."""
    sleeps = config.cluster.share_gpu == "sleep" and config.weights.transport == "auto"
    return torch.device("cpu") if config.engine.has_servers or sleeps else device


def resolve_transport(
    transport: str, *, device: torch.device, engine_device: torch.device, is_one_host: bool
) -> str:
    """What "auto" stands for; other names are returned as they are. `device`: the trainer's;
    `engine_device`: where engines stage weights."""
    if transport != "auto":
        return transport
    if not is_one_host:
        return "collective"
    on_gpus = device.type == engine_device.type == "cuda"
    return "ipc" if on_gpus else "shm"


def listening_address(cluster_address: str, *, is_one_host: bool) -> str:
    """Where the trainer listens for engines: loopback, or the host that serves the controller."""
    if is_one_host:
        return "127.0.0.1"
    # "tcp://HOST:PORT", or only a host if it is the advertised address.
    host = cluster_address.removeprefix("tcp://")
    host = host.rpartition(":")[0] if cluster_address.startswith("tcp://") else host
    return socket.gethostname() if host in ("*", "0.0.0.0", "[::]") else host.strip("[]")


def load_transport(name: str) -> Transport:
    """The transport of the user that settings name as "module:Class"."""
    cls = load_reference(name)
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise ConfigError(
            f"weights.transport = {name!r} is not a Transport; derive the class from"
            " millrace.weights.backends.Transport."
        )
    return cls()


def make_sender(
    transport: str,
    *,
    dtype: torch.dtype,
    payload: Payload = "full",
    directory: Path | None = None,
    address: str = "127.0.0.1",
    num_engines: int = 1,
    num_evaluators: int = 0,
    bucket_bytes: int = 2**26,
    timeout_s: float = 60.0,
    device: torch.device | None = None,
    reference: Reference | None = None,
) -> PackingSender:
    """Floating-point weights travel as `dtype`. disk and users' transports need `directory`.
    collective listens on
    `address`, waits for `num_engines`, or `num_evaluators` beside them, and sends from `device`
    (host memory if not given)."""
    backend: SendBackend
    match transport:
        case "shm":
            backend = ShmSendBackend()
        case "disk":
            assert directory is not None
            backend = DiskSendBackend(directory)
        case "ipc":
            backend = IpcSendBackend()
        case "collective":
            backend = CollectiveSendBackend(
                address=address,
                num_members={ENGINE: num_engines, EVALUATOR: num_evaluators},
                bucket_bytes=bucket_bytes,
                timeout_s=timeout_s,
                device=device or torch.device("cpu"),
            )
        case _:
            assert directory is not None
            backend = load_transport(transport).sender(directory=directory)
            backend.transport = transport
    return PackingSender(backend, dtype=dtype, payload=payload, reference=reference)


def make_receiver(
    transport: str,
    *,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    payload: Payload = "full",
    timeout_s: float = 60.0,
    role: str = ENGINE,
) -> StagingReceiver:
    """`expected` and `dtype`: shapes of the model's tensors by name, and the type of its
    floating-point tensors; other updates are refused. `device`: where the engine stages them.
    `role`: receivers of one role get a version together, where it is broadcast."""
    device = device or torch.device("cpu")
    backends: dict[str, Callable[[], RecvBackend]] = {
        "shm": ShmRecvBackend,
        "disk": DiskRecvBackend,
        "collective": lambda: CollectiveRecvBackend(device=device, timeout_s=timeout_s, role=role),
        "ipc": lambda: IpcRecvBackend(device=device),
    }
    if transport != "auto":
        make = backends.get(transport) or partial(load_transport(transport).receiver, device=device)
        backend = make()  # refuses a wrong device at once
        backends = {transport: lambda: backend}
    return StagingReceiver(
        backends, expected=expected, dtype=dtype, device=device, keep_base=payload == "delta"
    )
