"""Over TCP, only holders of the run's keys can send messages. Tests use real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio
from echo_worker import ask

from millrace.cluster.address import ClientKeys, Credentials, RunKeys, connect
from millrace.cluster.hub import Hub
from millrace.cluster.link import EVENT_ID, Link
from millrace.cluster.messages import GenerateDone, Hello, Message
from millrace.cluster.wire import encode
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError

Events = list[tuple[str, Message]]
NO_ENTRY = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@pytest.fixture
async def hub(tmp_path: Path, events: Events) -> AsyncIterator[Hub]:
    async with Hub(
        log_dir=tmp_path / "logs",
        on_event=lambda worker, message: events.append((worker, message)),
        address="tcp://127.0.0.1:0",
        stop_timeout_s=4.0,
    ) as hub:
        yield hub


def keys_of(hub: Hub) -> ClientKeys:
    assert hub._keys is not None
    return hub._keys.client


def without_curve(_hub: Hub, _socket: zmq.Socket) -> None: ...


def with_keys_of_another_run(_hub: Hub, socket: zmq.Socket) -> None:
    RunKeys.make().client.apply(socket)


def with_a_key_of_its_own(hub: Hub, socket: zmq.Socket) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    ClientKeys(server=keys_of(hub).server, public=public, secret=secret).apply(socket)


def with_plain_text(_hub: Hub, socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.PLAIN_USERNAME, b"worker")
    socket.setsockopt(zmq.PLAIN_PASSWORD, b"secret")


async def assert_answers(worker: Worker) -> None:
    assert isinstance(await worker.call(ask("echo"), timeout_s=10), GenerateDone)


@pytest.mark.parametrize(
    "comes", [without_curve, with_keys_of_another_run, with_a_key_of_its_own, with_plain_text]
)
async def test_messages_of_unknown_peers_are_rejected_and_the_run_continues(
    hub: Hub, events: Events, comes: Callable[[Hub, zmq.Socket], None]
):
    worker = await hub.launch("echo-0", "echo_worker")
    (identity,) = hub._workers  # even the right name and token do not help
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        comes(hub, stranger)
        stranger.setsockopt(zmq.ROUTING_ID, identity + b"x")
        monitor = stranger.get_monitor_socket(NO_ENTRY)
        stranger.connect(hub.address)
        stranger.send_multipart([EVENT_ID, *encode(Hello(worker="echo-0", pid=1))])
        async with asyncio.timeout(10):
            await monitor.recv_multipart()
        stranger.disable_monitor()
    await assert_answers(worker)
    assert hub.num_invalid == 0  # nothing arrived that could be refused
    assert hub.num_rejected == (comes is with_a_key_of_its_own)
    ((name, hello),) = events
    assert isinstance(hello, Hello)
    assert (name, hello.worker, hello.pid) == ("echo-0", "echo-0", worker.pid)


async def test_with_the_runs_keys_but_no_token_messages_are_counted_and_dropped(
    hub: Hub, events: Events
):
    worker = await hub.launch("echo-0", "echo_worker")
    with zmq.Context() as context:
        for identity in (b"echo-0:", b"echo-1:", b"host:", b"host:" + b"0" * 32 + b":1"):
            with context.socket(zmq.DEALER) as stranger:
                keys_of(hub).apply(stranger)
                stranger.setsockopt(zmq.ROUTING_ID, identity)
                stranger.connect(hub.address)
                stranger.send_multipart([EVENT_ID, *encode(Hello(worker="echo-0", pid=1))])
        async with asyncio.timeout(10):
            while hub.num_invalid < 4:  # noqa: ASYNC110 - the hub only counts them
                await asyncio.sleep(0.01)
    await assert_answers(worker)
    assert len(events) == 1


async def test_bytes_of_another_protocol_do_no_harm(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    host, port = hub.address.removeprefix("tcp://").split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f" + b"\xff" * 5000, b""):
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(garbage)
            await assert_answers(worker)
    await assert_answers(worker)


async def test_a_peer_that_announces_a_huge_frame_is_disconnected_before_the_handshake(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    host, port = hub.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    command_of_4_gib = b"\x06" + (2**32).to_bytes(8, "big")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(greeting)
    await reader.readexactly(len(greeting))
    writer.write(command_of_4_gib + bytes(1000))
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await assert_answers(worker)


async def test_a_peer_that_announces_a_huge_frame_is_disconnected_after_the_handshake(tmp_path):
    async with Hub(
        log_dir=tmp_path,
        on_event=lambda *_: None,
        address="tcp://127.0.0.1:0",
        max_frame_bytes=2**20,
    ) as hub:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            keys_of(hub).apply(peer)
            monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.connect(hub.address)
            await peer.send_multipart([EVENT_ID, bytes(2**19)])  # allowed, but no message
            async with asyncio.timeout(10):
                while hub.num_invalid < 1:  # noqa: ASYNC110 - the hub only counts them
                    await asyncio.sleep(0.01)
            await peer.send_multipart([EVENT_ID, bytes(2**21)])
            async with asyncio.timeout(10):
                await monitor.recv_multipart()
            peer.disable_monitor()
        assert hub.num_invalid == 1


def test_worker_sends_nothing_to_a_server_without_the_hub_key():
    """Not even its token: a process that takes over a freed port learns nothing."""
    keys, impostor_keys = RunKeys.make().client, RunKeys.make()
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as impostor,
        context.socket(zmq.DEALER) as dealer,
    ):
        impostor.setsockopt(zmq.CURVE_SERVER, 1)
        impostor.setsockopt(zmq.CURVE_SECRETKEY, impostor_keys.server_secret.encode())
        impostor.bind("tcp://127.0.0.1:*")
        monitor = impostor.get_monitor_socket(NO_ENTRY)
        address = impostor.getsockopt_string(zmq.LAST_ENDPOINT)
        connect(dealer, address, identity=b"worker-0:token", keys=keys, heartbeat_timeout_s=None)
        dealer.linger = 0
        dealer.send_multipart([EVENT_ID, *encode(Hello(worker="worker-0", pid=1))])
        assert monitor.poll(10_000), "the handshake was not refused"
        assert not impostor.poll(200)
        impostor.disable_monitor()


async def test_worker_without_keys_does_not_connect(hub: Hub):
    with pytest.raises(ConfigError, match="without the keys of the run"):
        Link(hub.address, name="worker-0")


async def test_keys_reach_neither_command_lines_nor_children_of_workers(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    commands = " ".join(psutil.Process(worker.pid).cmdline())
    for secret in (keys_of(hub).secret, next(iter(hub._workers)).split(b":")[1].decode()):
        assert secret not in commands
    reply = await worker.call(ask("count secrets"))
    assert isinstance(reply, GenerateDone)
    assert reply.completions[0].tokens == [0]


@pytest.mark.parametrize("preload", [(), ("json",)], ids=["started", "forked"])
async def test_users_keys_reach_only_workers_that_need_them(tmp_path, monkeypatch, preload):
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret")
    monkeypatch.setenv("PGPASSWORD", "of a database")
    monkeypatch.setenv("HF_TOKEN", "to download models")
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, preload=preload) as hub:
        engine = await hub.launch("engine-0", "echo_worker")
        scorer = await hub.launch("scorer-0", "echo_worker", has_secrets=True)
        for worker, count in ((engine, 0), (scorer, 1)):
            reply = await worker.call(ask("count secrets"))
            assert isinstance(reply, GenerateDone)
            assert reply.completions[0].tokens == [count]
        environment = psutil.Process(engine.pid).environ()  # as others read it in /proc
        assert "PGPASSWORD" not in environment
        assert "s3cret" not in environment.values()
        assert "HF_TOKEN" in environment


def test_credentials_pass_by_environment_and_are_taken_out_of_it():
    held = Credentials(token="t", keys=RunKeys.make().client)
    environment = {"OTHER": "1", **held.to_environment()}
    assert Credentials.take(environment) == held
    assert environment == {"OTHER": "1"}
    assert Credentials.take({}) == Credentials()
    assert held.keys is not None
    assert held.keys.secret not in repr(held)


async def test_every_run_has_keys_of_its_own(hub: Hub, tmp_path: Path):
    async with Hub(
        log_dir=tmp_path, on_event=lambda *_: None, address="tcp://127.0.0.1:0"
    ) as other:
        assert len({keys_of(hub).secret, keys_of(other).secret, hub.ticket().token}) == 3
        assert keys_of(hub).server != keys_of(other).server


def test_a_libzmq_that_cannot_authenticate_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: feature != "curve")
    with pytest.raises(ConfigError, match=r"install pyzmq from PyPI, or set cluster\.address"):
        Hub(log_dir=tmp_path, on_event=lambda *_: None, address="tcp://127.0.0.1:0")
    Hub(log_dir=tmp_path, on_event=lambda *_: None)  # a local socket needs no keys
