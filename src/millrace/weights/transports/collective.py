"""The collective transport: one broadcast from the trainer to all engines, on any host.

Promise: an engine gets the whole version or a WeightError. A peer that dies or hangs ends the
broadcast (at once, or after timeout_s); the remaining engines request the version again and get it
in a new group.

Each update names the address of the trainer's RendezvousServer. The trainer's thread "broadcast"
sends, beside training and the packing of the next version. Traffic beyond loopback is not encrypted
and, between the members of a group, not authenticated: use it in a trusted network.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.weights.backends import Fetched, Memory, RecvBackend, SendBackend, Staging
from millrace.weights.transports.rendezvous import (
    ENGINE,
    BroadcastFailed,
    BroadcastGroup,
    RendezvousCaller,
    RendezvousClient,
    RendezvousServer,
    TransferAdmission,
    TransferRequest,
    join_store,
    open_store,
)

_ATTEMPTS = 3  # per engine and version: two peers may fail meanwhile


class CollectiveEndpoint(msgspec.Struct, kw_only=True, frozen=True):
    """Location of an update: where to request it."""

    host: str
    port: int  # of the RendezvousServer
    store_port: int  # of the store in which the members of a group find each other
    token: str
    on_gpu: bool  # NCCL broadcasts between GPUs; otherwise gloo between hosts


class CollectiveSendBackend(SendBackend):
    """Trainer side. Its methods are called by the publisher's thread."""

    transport = "collective"

    def __init__(
        self,
        *,
        address: str,
        num_members: Mapping[str, int],  # engines by role
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,  # of the payload while it is sent
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._timeout_s = timeout_s
        self._server = RendezvousServer(address, num_members=num_members, timeout_s=timeout_s)
        self._store = open_store(address, timeout_s=timeout_s)
        self._endpoint = CollectiveEndpoint(
            host=address,
            port=self._server.port,
            store_port=self._store.port,
            token=self._server.token,
            on_gpu=device.type == "cuda",
        )
        self._changed = threading.Condition()
        # Guarded by the condition.
        # By version: the payload under None, and the delta under the checksum of its base.
        self._offers: dict[int, dict[int | None, torch.Tensor]] = {}
        self._sending: int | None = None  # version
        self._is_closing = False
        self._error: BaseException | None = None
        # The thread's own.
        # By role, as long as the same callers ask: the group, its number, and the callers.
        self._groups: dict[str, tuple[BroadcastGroup, int, list[RendezvousCaller]]] = {}
        self._group_number = 0  # of the newest
        self._thread = threading.Thread(target=self._serve, name="broadcast", daemon=True)
        self._thread.start()

    def allocate(self, num_bytes: int, *, device: torch.device) -> Memory:
        return Memory(num_bytes, device=self._device)

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        blobs: dict[int | None, torch.Tensor] = {None: payload.flat}
        if delta is not None and update.delta is not None:
            blobs[update.delta.base] = delta.flat
        if self._device.type == "cuda":  # the thread that sends has a stream of its own
            torch.cuda.current_stream(self._device).synchronize()
        with self._changed:
            if self._error is not None:
                raise self._error
            self._offers[update.version] = blobs
        return replace(update, location=msgspec.json.encode(self._endpoint).decode())

    def withdraw(self, version: int) -> None:
        with self._changed:
            del self._offers[version]
            self._changed.wait_for(lambda: self._sending != version)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._offers.clear()
        self._thread.join()
        self._server.close()
        del self._store

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                if requests := self._server.poll():
                    self._admit(requests)
        except BaseException as error:  # noqa: BLE001 - raised by the next offer
            with self._changed:
                self._error = error
        finally:
            for role in [*self._groups]:
                self._drop_group(role)

    def _admit(self, requests: Mapping[RendezvousCaller, TransferRequest]) -> None:
        """Send the version that these callers requested, or refuse it if it was released."""
        first = next(iter(requests.values()))
        version, role = first.version, first.role
        with self._changed:
            blobs = self._offers.get(version)
            self._sending = None if blobs is None else version
        if blobs is None:
            refusal = TransferAdmission(refusal=f"version {version} was released")
            for caller in requests:
                self._server.answer(caller, refusal)
            return
        # All get the delta if all hold its base.
        has_base = first.base in blobs and all(r.base == first.base for r in requests.values())
        base = first.base if has_base else None
        try:
            self._send(role, [*requests], blobs[base], is_delta=base is not None)
        except BroadcastFailed:
            self._drop_group(role)  # the remaining engines notice it and request again
        finally:
            with self._changed:
                self._sending = None
                self._changed.notify_all()

    def _send(
        self, role: str, callers: list[RendezvousCaller], blob: torch.Tensor, *, is_delta: bool
    ) -> None:
        kept = self._groups.get(role)
        if kept is None or {*callers} != {*kept[2]}:
            self._drop_group(role)
            self._group_number += 1
            group = BroadcastGroup(device=self._device, timeout_s=self._timeout_s)
            kept = self._groups[role] = (group, self._group_number, callers)
        group, number, members = kept
        size = len(members) + 1
        for rank, caller in enumerate(members, start=1):
            admission = TransferAdmission(
                group=number,
                rank=rank,
                size=size,
                is_delta=is_delta,
                bucket_bytes=self._bucket_bytes,
                num_bytes=len(blob),
            )
            if not self._server.answer(caller, admission):
                raise BroadcastFailed("an engine left before the broadcast began")
        group.join(self._store, number=number, rank=0, size=size, host=self._endpoint.host)
        group.broadcast(blob, bucket_bytes=self._bucket_bytes)

    def _drop_group(self, role: str) -> None:
        if role in self._groups:
            self._groups.pop(role)[0].close()


class CollectiveRecvBackend(RecvBackend):
    def __init__(self, *, device: torch.device, timeout_s: float, role: str = ENGINE) -> None:
        self._role = role
        self._device = device  # where the engine computes
        self._timeout_s = timeout_s
        self._endpoint: CollectiveEndpoint | None = None
        self._client: RendezvousClient | None = None
        self._store: Any = None
        self._group: BroadcastGroup | None = None

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        error: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._receive(update, delta, staging)
            except (BroadcastFailed, OSError) as failure:
                self.close()
                error = failure
        raise WeightError(
            f"Version {update.version} did not arrive ({error}): the trainer or another engine died"
            f" or took longer than {self._timeout_s:g} s, which supervision.hang_timeout_s raises;"
            " the engine keeps the weights it has."
        ) from error

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._client is not None:
            self._client.close()
        self._group = self._client = self._store = self._endpoint = None

    def _receive(self, update: WeightUpdate, delta: Delta | None, staging: Staging) -> Fetched:
        endpoint = msgspec.json.decode(update.location, type=CollectiveEndpoint)
        client, group = self._connect(endpoint)
        wanted = {"version": update.version, "base": None if delta is None else delta.base}
        request = TransferRequest(token=endpoint.token, role=self._role, **wanted)
        admission = client.request(request)
        if admission.refusal:
            raise WeightError(f"The trainer refuses to send: {admission.refusal}.")
        place = {"number": admission.group, "rank": admission.rank, "size": admission.size}
        group.join(self._store, **place, host=client.own_host)
        if admission.is_delta:
            assert delta is not None
            flat = torch.empty(delta.num_bytes, dtype=torch.uint8, device=group.device)
        else:
            flat = staging.take(update, device=group.device)
        if admission.num_bytes != len(flat):
            self.close()  # so that the trainer does not wait for this engine
            raise WeightError(
                f"The trainer sends {admission.num_bytes} bytes of version {update.version}, which"
                f" has {len(flat)}; the engine keeps the weights it has."
            )
        group.broadcast(flat, bucket_bytes=admission.bucket_bytes)
        return Fetched(flat, "delta" if admission.is_delta else "staged")

    def _connect(self, endpoint: CollectiveEndpoint) -> tuple[RendezvousClient, BroadcastGroup]:
        if endpoint.on_gpu and self._device.type != "cuda":
            raise WeightError(
                "The trainer broadcasts between GPUs, but this process computes on"
                f" {str(self._device)!r}; give it a GPU in [placement], or set"
                " weights.transport = 'disk'."
            )
        if self._client is None or self._group is None or endpoint != self._endpoint:
            self.close()
            # The trainer may first wait for another engine to time out.
            timeout_s = 2 * self._timeout_s
            self._client = RendezvousClient(endpoint.host, endpoint.port, timeout_s=timeout_s)
            self._store = join_store(endpoint.host, endpoint.store_port, timeout_s=self._timeout_s)
            device = self._device if endpoint.on_gpu else torch.device("cpu")
            self._group = BroadcastGroup(device=device, timeout_s=self._timeout_s)
            self._endpoint = endpoint
        return self._client, self._group
