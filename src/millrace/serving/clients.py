"""Who sends a request: API keys, Host headers, and the rate, the concurrent requests and the tokens
of each client, which is a key or, without keys, the address that a request comes from.

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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aiohttp import web

from millrace.serving.api.errors import ApiError
from millrace.serving.metrics import ServerMetrics

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


class TokenQuota:
    """The tokens that a tenant may use per minute: those of its prompts and of its training data,
    and those that it samples.

    A request passes while any are left, whatever its size; the next one waits for what it took. It
    reserves all tokens that it may sample, until it is known how many it did.
    """

    def __init__(
        self, per_minute: int | None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`per_minute`: None = no quota."""
        self._per_minute, self._now_s = per_minute, now_s
        self._left, self._since_s = float(per_minute or 0), now_s()
        self._num_reserved = 0  # they are not left, but may come back

    def take(self, num_tokens: int, *, num_reserved: int = 0, is_checked: bool = True) -> None:
        """Raise ApiError if none are left, unless is_checked = False. settle() has to follow for
        the reserved ones."""
        if self._per_minute is None:
            return
        per_s, now_s = self._per_minute / 60, self._now_s()
        self._left = min(self._per_minute, self._left + (now_s - self._since_s) * per_s)
        self._since_s = now_s
        if is_checked and self._left <= 0:
            message = f"You have used the quota of {self._per_minute} tokens per minute; wait."
            wait_s = math.ceil(max(0.0, -self._left - self._num_reserved) / per_s) + 1
            raise ApiError(message, status=429, code="quota_exceeded", retry_after_s=wait_s)
        self._left -= num_tokens + num_reserved
        self._num_reserved += num_reserved

    def settle(self, num_reserved: int, *, num_used: int) -> None:
        """Give back reserved tokens that were not used."""
        self._left += num_reserved - num_used
        self._num_reserved -= num_reserved


class TokenQuotas:
    """Of all tenants. They are full when the server starts."""

    def __init__(
        self, per_minute: int | None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute, self._now_s = per_minute, now_s  # of each tenant
        self._by_tenant: dict[str, TokenQuota] = {}

    def of(self, client: Client) -> TokenQuota:
        new = TokenQuota(self._per_minute, now_s=self._now_s)
        return self._by_tenant.setdefault(client.tenant, new)


class RequestPlaces:
    """Bounds the concurrent requests of all clients.

    Promise: a key always finds its equal part of half of the places. The other half, and without
    keys all of them, are for everyone.
    """

    def __init__(self, limit: int, *, num_keys: int, metrics: ServerMetrics) -> None:
        self._part = limit // 2 // num_keys if num_keys else 0  # of each key
        self._num_shared = limit - num_keys * self._part
        self._running: Counter[str] = Counter()  # requests, by client
        self._metrics = metrics

    @contextlib.contextmanager
    def held(self, client: Client) -> Iterator[None]:
        running, metrics = self._running, self._metrics
        num_shared = sum(max(0, count - self._part) for count in running.values())
        if running[client.name] >= self._part and num_shared >= self._num_shared:
            message = f"The server is busy with {metrics.running} requests; try again later."
            raise ApiError(message, status=429, retry_after_s=1)
        running[client.name] += 1
        metrics.running += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionResetError):
            metrics.disconnects += 1
            raise
        finally:
            metrics.running -= 1
            running[client.name] -= 1
            if not running[client.name]:
                del running[client.name]


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
            raise wrong_key()
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


def wrong_key() -> ApiError:
    message = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
    return ApiError(message, status=401, code="invalid_api_key")
