"""How a worker authenticates to the hub: its token, and over TCP the CURVE keys of the run.

Promise: over TCP only holders of the client secret key can send a message, only the holder of the
hub's secret key can act as the hub, and all traffic is encrypted. Secrets travel by environment
variable and by ticket, never by command line; no repr shows one.
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
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq sends authentication requests
ZAP_DOMAIN = b"millrace"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """The CURVE keys of a client. Keys are Z85 text: 40 characters, no spaces."""

    server: str  # public key of the hub
    public: str
    secret: str = field(repr=False)

    def apply(self, socket: zmq.Socket) -> None:
        """Before connect: use CURVE, and accept this hub only."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Both key pairs of one run; they are as old as its hub."""

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

    def apply(self, socket: zmq.Socket) -> None:
        """Before bind: accept only connections that the authenticator accepts."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without an authenticator libzmq would accept any key; with this it accepts none.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The secrets of one worker."""

    token: str = field(default="", repr=False)
    keys: ClientKeys | None = None  # None if the hub listens at a local socket

    def to_environment(self) -> dict[str, str]:
        if self.keys is None:
            return {TOKEN_VARIABLE: self.token}
        keys = f"{self.keys.server} {self.keys.public} {self.keys.secret}"
        return {TOKEN_VARIABLE: self.token, KEYS_VARIABLE: keys}

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> Self:
        """Remove them from the environment: processes that a worker starts must not have them."""
        token = environment.pop(TOKEN_VARIABLE, "")
        words = environment.pop(KEYS_VARIABLE, "").split()
        if len(words) != 3:
            return cls(token=token)
        server, public, secret = words
        return cls(token=token, keys=ClientKeys(server=server, public=public, secret=secret))


class TokenAuthenticator:
    """Answers the authentication requests of libzmq (ZAP, RFC 27).

    It accepts the client key of the run only. Create it before the hub binds; run() is a task on
    the hub's loop.
    """

    def __init__(self, context: zmq.asyncio.Context, *, keys: ClientKeys) -> None:
        self.num_rejected = 0  # connections with another key
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
                *client_key,
            ) = await self._socket.recv_multipart()
            is_valid = mechanism == b"CURVE" and client_key == [self._key]
            self.num_rejected += not is_valid
            status = [b"200", b"OK"] if is_valid else [b"400", b"unknown key"]
            await self._socket.send_multipart([version, request, *status, b"", b""])
