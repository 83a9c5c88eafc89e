"""Clients: API keys, Host headers, the rate of each client, and whose sequences the engines get
next. A client is a key or, without keys, the address that a request comes from.

Promise: a wrong key gets 401, and a client that sends requests too fast gets 429, without effect on
other clients. Without keys, a request gets 421 unless its Host header is a loopback name or address
or an allowed host: a web page whose domain resolves to this machine (DNS rebinding) cannot use the
server. Runs on the server's event loop.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from aiohttp import web

from millrace.core.records import Request
from millrace.serving.api.errors import ApiError

KEY_HEADER = "X-API-Key"  # without "Bearer"; as clients of the training API send it
MAX_CLIENTS = 4096  # whose requests are counted; the least recent are dropped
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # without the port


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    name: str
    # Requests with the same salt share cached KV of prompts. No client learns from the time of its
    # reply what another one has sent.
    cache_salt: str = ""
    tenant: str = "local"  # stays the same when the server restarts; one for all without a key


class RateLimit:
    """A token bucket per client, with room for the requests of one second."""

    def __init__(self, per_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._capacity = max(per_s, 1.0)
        self._now_s = now_s
        # client -> tokens left, and since when; the most recent client is last
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """Count a request. Returns 0 if it may pass, otherwise the seconds until it may."""
        now = self._now_s()
        left, since = self._left.pop(client, (self._capacity, now))
        left = min(self._capacity, left + (now - since) * self._per_s)
        passes = left >= 1.0
        self._left[client] = (left - 1.0 if passes else left, now)
        if len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if passes else (1.0 - left) / self._per_s


class ClientGuard:
    """Finds the client of a request, or refuses the request."""

    def __init__(self, keys: Sequence[str], *, rate: float, hosts: Sequence[str] = ()) -> None:
        """`keys`: empty admits everyone who uses an allowed host."""
        self._clients = {
            key: Client(
                name=f"key {number}",
                cache_salt=secrets.token_hex(16),
                tenant=hashlib.sha256(key.encode()).hexdigest()[:32],
            )
            for number, key in enumerate(keys)
        }
        self._hosts = frozenset(map(str.lower, hosts))
        self._rate = RateLimit(rate)

    def admit(self, request: web.Request) -> Client:
        known = next((c for key, c in self._clients.items() if shows_key(request, key)), None)
        # Clients without a key must not use up the rate of those with one.
        client = known or Client(name=f"from {request.remote}")
        if (wait_s := self._rate.wait_s(client.name)) > 0:
            message = "Too many requests in a short time; try again later."
            raise ApiError(message, status=429, retry_after_s=math.ceil(wait_s))
        if self._clients and known is None:
            raise _wrong_key()
        if not self._clients:
            self._check_host(request.headers.get("Host", ""))
        return client

    def _check_host(self, header: str) -> None:
        found = _HOST.fullmatch(header.strip().lower())
        name = found[1].rstrip(".") if found else ""
        if name not in self._hosts and not _is_loopback(name):
            raise ApiError(
                f"The Host header {header[:80]!r} names neither this machine nor an allowed host;"
                " use http://127.0.0.1, or start the server with --allowed-host or an API key.",
                status=421,
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def shows_key(request: web.Request, key: str) -> bool:
    header = request.headers.get("Authorization", "")
    if not header and KEY_HEADER in request.headers:
        header = f"Bearer {request.headers[KEY_HEADER]}"
    scheme, _, shown = header.partition(" ")
    # Compared in constant time, so that timing reveals nothing about the key.
    is_right = hmac.compare_digest(shown.strip().encode(errors="replace"), key.encode())
    return is_right and scheme.lower() == "bearer"


def check_key(request: web.Request, key: str) -> None:
    if not shows_key(request, key):
        raise _wrong_key()


def _wrong_key() -> ApiError:
    message = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
    return ApiError(message, status=401, code="invalid_api_key")


_REQUEST_SHARE = 3  # sequences of a request for each place that it leaves free
_CLIENT_SHARE = 7  # the same for all requests of a client, if there are several clients
_PARTS = 4  # a request is split into parts of at most 1 / _PARTS of the places


@dataclass(eq=False, slots=True)
class QueuedPart:
    """One part of a request, waiting or in the engines."""

    request: Request
    started: asyncio.Future[int]  # its priority in the engine's own queue
    num_sampled: int = 0  # tokens; set by the caller


@dataclass(eq=False, slots=True)
class _ActiveClient:
    num_used: int  # tokens
    num_running: int = 0  # sequences
    flows: dict["Flow", None] = field(default_factory=dict["Flow", None])  # the oldest first


@dataclass(eq=False, slots=True)
class Flow:
    """One request of a client, with all its parts."""

    client: str
    waiting: deque[QueuedPart] = field(default_factory=deque[QueuedPart])
    num_running: int = 0  # sequences


class FairQueue:
    """Decides which sequences the engines get next, in front of the engines' own queues.

    Clients take turns by deficit round robin that is paid afterwards: next comes the client that
    has used the fewest tokens since it became active. The requests of one client take turns by the
    number of sequences that they have in the engines.

    Promise: the engines never have more than `capacity` sequences at a time, apart from the last
    part of a request. A request has at most three times as many sequences there as there are free
    places, so the next request finds one. With several keys, a client has at most seven times as
    many, so another client finds one.
    """

    def __init__(self, capacity: int, *, separates_clients: bool) -> None:
        self._free = self._capacity = capacity
        self._separates_clients = separates_clients
        self._clients: dict[str, _ActiveClient] = {}

    def parts(self, request: Request) -> Iterator[Request]:
        """Split a request with many completions. Each keeps its index, and so its tokens."""
        size = max(1, self._capacity // _PARTS)
        if request.n <= size:
            yield request
            return
        for first in range(0, request.n, size):
            yield replace(
                request,
                id=f"{request.id}-{first}",
                n=min(size, request.n - first),
                index=request.index + first,
            )

    @contextlib.asynccontextmanager
    async def places(self, flow: Flow, request: Request) -> AsyncIterator[QueuedPart]:
        """Wait for places in the engines, and hold them inside the context."""
        part = QueuedPart(request, asyncio.get_running_loop().create_future())
        client = self._clients.get(flow.client)
        if client is None:
            # It takes turns from now on; what it did not use before is no credit.
            used = min((each.num_used for each in self._clients.values()), default=0)
            client = self._clients[flow.client] = _ActiveClient(used)
        client.flows[flow] = None
        flow.waiting.append(part)
        self._start_next()
        try:
            await part.started
            yield part
        finally:
            if part in flow.waiting:
                flow.waiting.remove(part)
            else:
                self._count(client, flow, -request.n)
                client.num_used += part.num_sampled
            if not flow.waiting and not flow.num_running:
                del client.flows[flow]
            if not client.flows:
                del self._clients[flow.client]
            self._start_next()

    def _start_next(self) -> None:
        while found := self._next():
            client, flow = found
            part = flow.waiting.popleft()
            # A request that has nothing in the engines also passes what others have queued there.
            priority = 0 if flow.num_running else self._capacity
            self._count(client, flow, part.request.n)
            client.num_used += len(part.request.prompt)
            if not part.started.done():  # otherwise its caller was cancelled and will give it back
                part.started.set_result(priority)

    def _next(self) -> tuple[_ActiveClient, Flow] | None:
        if self._free <= 0:
            return None
        for client in sorted(self._clients.values(), key=lambda each: each.num_used):
            for flow in sorted(client.flows, key=lambda each: each.num_running):
                if flow.waiting and self._leaves_room(client, flow):
                    return client, flow
        return None

    def _leaves_room(self, client: _ActiveClient, flow: Flow) -> bool:
        num_new = flow.waiting[0].request.n
        num_left = self._free - num_new
        shares = [(flow.num_running, _REQUEST_SHARE)]
        if self._separates_clients:
            shares.append((client.num_running, _CLIENT_SHARE))
        return all(count == 0 or count + num_new <= share * num_left for count, share in shares)

    def _count(self, client: _ActiveClient, flow: Flow, num_sequences: int) -> None:
        self._free -= num_sequences
        client.num_running += num_sequences
        flow.num_running += num_sequences
