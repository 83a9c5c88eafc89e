"""What gets a worker past the hub's door: its token, and over TCP the CURVE keys of the run.

Promise: over TCP nobody without the run's client secret key gets a message through, and nobody
without the hub's secret key is taken for the hub; all that passes is encrypted. Secrets travel by
environment variable and by ticket, never by command line; no repr shows one.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils import z85

from millrace.core.errors import ConfigError

TOKEN_VARIABLE = "MILLRACE_HUB_TOKEN"
KEYS_VARIABLE = "MILLRACE_HUB_KEYS"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks who may come in
ZAP_DOMAIN = b"millrace"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """What a worker shows and expects. Keys are Z85 text: 40 characters, no spaces."""

    server: str  # public key of the hub
    public: str
    secret: str = field(repr=False)

    def lock(self, socket: zmq.Socket) -> None:
        """Before connect: speak CURVE, and to this hub only."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Both key pairs of one run; they live as long as its hub."""

    server_secret: str = field(repr=False)
    client: ClientKeys

    @classmethod
    def make(cls) -> Self:
        if not zmq.has("curve"):
            raise ConfigError(
                "cluster.address is a TCP address, but this build of libzmq cannot authenticate"
                " (no CURVE); install pyzmq from PyPI, or set cluster.address = 'auto'."
            )
        (server, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
        keys = ClientKeys(server=server.decode(), public=public.decode(), secret=secret.decode())
        return cls(server_secret=server_secret.decode(), client=keys)

    def lock(self, socket: zmq.Socket) -> None:
        """Before bind: take in nobody whom the doorkeeper does not let pass."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without a doorkeeper, libzmq would let any key pass; with this, none.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What one worker holds."""

    token: str = field(default="", repr=False)
    keys: ClientKeys | None = None  # None: the hub listens at a local socket

    def to_environment(self) -> dict[str, str]:
        if self.keys is None:
            return {TOKEN_VARIABLE: self.token}
        keys = f"{self.keys.server} {self.keys.public} {self.keys.secret}"
        return {TOKEN_VARIABLE: self.token, KEYS_VARIABLE: keys}

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Self:
        """Out of the environment: what a worker itself starts has no business with the hub."""
        token = environment.pop(TOKEN_VARIABLE, "")
        words = environment.pop(KEYS_VARIABLE, "").split()
        if len(words) != 3:
            return cls(token=token)
        server, public, secret = words
        return cls(token=token, keys=ClientKeys(server=server, public=public, secret=secret))


class TokenAuthenticator:
    """Answers libzmq (ZAP, RFC 27) who may connect: holders of the run's client key, nobody else.

    Made before the hub binds; run() is a task on the hub's loop.
    """

    def __init__(self, context: zmq.asyncio.Context, *, keys: ClientKeys) -> None:
        self.turned_away = 0  # peers that spoke CURVE with another key
        self._key = z85.decode(keys.public)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)

    async def run(self) -> None:
        while True:
            (
                version,
                request,
                _domain,
                _address,
                _identity,
                mechanism,
                *proof,
            ) = await self._socket.recv_multipart()
            passes = mechanism == b"CURVE" and proof == [self._key]
            self.turned_away += not passes
            status = [b"200", b"OK"] if passes else [b"400", b"unknown key"]
            await self._socket.send_multipart([version, request, *status, b"", b""])
