"""Decides which sequences the engines get next, in front of the engines' own queues.

Clients take turns by deficit round robin that is paid afterwards: next comes the client that has
used the fewest tokens since it became active. The requests of one client take turns by the number
of sequences that they have in the engines.

Promise: the engines never have more than `capacity` sequences at a time, apart from the last part
of a request. A request has at most three times as many sequences there as there are free places, so
the next request finds one. With several keys, a client has at most seven times as many, so another
client finds one. Runs on the server's event loop.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.core.records import Request, Sampling

_REQUEST_SHARE = 3  # sequences of a request for each place that it leaves free
_CLIENT_SHARE = 7  # the same for all requests of a client, if there are several clients
_PARTS = 4  # a request is split into parts of at most 1 / _PARTS of the places
_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class QueuedPart:
    """One part of a request, waiting or in the engines."""

    request: Request
    started: asyncio.Future[int]  # its priority in the engine's own queue
    num_sampled: int = 0  # tokens so far; set by the caller


@dataclass(eq=False, slots=True)
class _ActiveClient:
    num_used: int  # tokens
    num_running: int = 0  # sequences
    flows: dict["Flow", None] = field(default_factory=dict["Flow", None])  # the oldest first


@dataclass(eq=False, slots=True)
class Flow:
    """One request of a client, with all its parts."""

    client: str
    number: int = field(default_factory=_numbers.__next__)  # see Request.flow
    waiting: deque[QueuedPart] = field(default_factory=deque[QueuedPart])
    num_running: int = 0  # sequences
    num_sampled: int = 0  # tokens of the parts that have left the engines


class FairQueue:
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
                flow.num_sampled += part.num_sampled
            if not flow.waiting and not flow.num_running:
                del client.flows[flow]
            if not client.flows:
                del self._clients[flow.client]
            self._start_next()

    def turn(
        self, client: str, num_used: int, *, num_places: int = 1
    ) -> contextlib.AbstractAsyncContextManager[QueuedPart]:
        """Hold places for work that is no request and uses so many tokens."""
        prompt = np.broadcast_to(np.int32(0), num_used)  # takes no memory
        work = Request(id="", prompt=prompt, sampling=Sampling(), n=num_places)
        return self.places(Flow(client), work)

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
