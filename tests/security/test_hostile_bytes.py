"""Hostile bytes are read, or refused with the expected error, without large allocations."""

import contextlib
import json
import select
import socket
import struct
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import mutations
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace.cluster.address import ClientKeys
from millrace.cluster.join.ticket import JoinTicket, read_ticket
from millrace.cluster.wire import ARRAY_CODE, DTYPES, WireError, decode
from millrace.core.errors import ConfigError
from millrace.environments.tools.calls import FORMATS
from millrace.serving.api.bodies import ChatBody, CompletionBody
from millrace.serving.api.chat import read_messages
from millrace.serving.api.errors import ApiError
from millrace.serving.api.reading import Body, read_body
from millrace.serving.tinker import wire
from millrace.training.checkpoints.directory import damage_to
from millrace.weights.transports.rendezvous import RendezvousServer, TransferRequest

MOST_BYTES = 4 * 2**20  # allowed allocation for a few hundred hostile bytes
E = TypeVar("E", bound=Exception)
HUGE = st.sampled_from([2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1])


costs_little = partial(mutations.costs_little, most_bytes=MOST_BYTES)


def refusal_of(read: Callable[[], object], *, kind: type[E]) -> E | None:
    """Return the expected error, or None if the bytes were read; other errors fail the test."""
    try:
        read()
    except kind as error:
        return error
    return None


@st.composite
def claims(draw: st.DrawFn) -> bytes:
    """Msgpack with forged lengths of gigabytes, nested in a plausible message."""
    kind = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]))
    length = struct.pack(">I", draw(st.integers(2**16, 2**32 - 1)))
    outer = draw(
        st.sampled_from([b"", b"\x82\xa4type\xa8Progress\xa5spans", b"\x91", b"\x81\xa4type"])
    )
    return outer + kind + length + draw(st.binary(max_size=40))


@settings(deadline=None)
@given(claims(), st.lists(st.binary(max_size=20), max_size=2))
def test_forged_lengths_allocate_no_memory(header: bytes, arrays: list[bytes]):
    def read() -> None:
        assert refusal_of(lambda: decode([header, *arrays]), kind=WireError) is not None

    costs_little(read)


@settings(deadline=None)
@given(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(sorted(DTYPES))
    | st.sampled_from(["|O", "|S9", "<U9", "|V8", "", "<f16", "f4"]),
    st.lists(HUGE | st.integers(-(2**63), 3), max_size=12),
    st.binary(max_size=24),
)
@example(0, "<f8", [0, 2**62], b"")
@example(0, "|i1", [2**32, 2**32], b"")
def test_forged_shapes_allocate_no_memory(index, dtype, shape, frame):
    array = msgspec.msgpack.Ext(ARRAY_CODE, msgspec.msgpack.encode((index, dtype, shape)))
    columns = {"x": [array]}
    header = msgspec.msgpack.encode(
        {
            "type": "ScoreGroup",
            "function": "f",
            "prompts": [],
            "completions": [],
            "completion_ids": [],
            "columns": columns,
        }
    )

    costs_little(lambda: refusal_of(lambda: decode([header, frame]), kind=WireError))


TICKET = msgspec.json.encode(
    JoinTicket(
        address="tcp://10.0.0.1:5000",
        heartbeat_timeout_s=30.0,
        keys=ClientKeys(server="s" * 40, public="c" * 40, secret="SECRET" * 6 + "1234"),
        token="t" * 32,
        versions={"torch": "2.13.0"},
    )
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=64)
    | st.integers(0, len(TICKET) - 1).map(lambda n: TICKET[:n])
    | st.tuples(st.integers(0, len(TICKET) - 1), st.integers(0, 255)).map(
        lambda at: TICKET[: at[0]] + bytes([at[1]]) + TICKET[at[0] + 1 :]
    )
)
@example(b"[" * 100_000)
def test_a_ticket_is_read_or_refused_without_quoting_it(tmp_path: Path, data: bytes):
    path = tmp_path / "ticket"
    path.touch(mode=0o600)
    path.write_bytes(data)
    error = refusal_of(lambda: read_ticket(path), kind=ConfigError)
    if error is not None:
        assert "SECRET" not in "".join(traceback.format_exception(error))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KINDS = (ChatBody, CompletionBody)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"]) | plain},
    optional={"content": plain, "tool_calls": plain, "tool_call_id": plain, "name": plain},
)
bodies = st.fixed_dictionaries(
    {"model": st.just("tiny") | plain, "messages": st.lists(message, max_size=3) | plain},
    optional={name: plain for name in FIELDS if name not in ("model", "messages")},
)


@settings(deadline=None)
@given(
    st.sampled_from(KINDS), st.binary(max_size=60) | bodies.map(lambda b: json.dumps(b).encode())
)
@example(ChatBody, b"[" * 100_000)
@example(ChatBody, b'{"model": "x", "messages": ' + b'{"a":' * 5000)
@example(CompletionBody, b'{"model": "a", "prompt": [1], "seed": ' + b"9" * 5000 + b"}")
@example(CompletionBody, b'{"model": "a", "prompt": [1], "temperature": 1e999}')
@example(CompletionBody, b'{"model": "x", "prompt": "\\ud800"}')
def test_a_body_is_read_or_refused(kind, data: bytes):
    def read() -> None:
        body = read_body(kind, data)
        if isinstance(body, ChatBody):
            read_messages(body.messages, form=FORMATS["hermes"])

    error = refusal_of(read, kind=ApiError)
    if error is not None:
        assert 400 <= error.status < 500
        json.dumps(error.body(), ensure_ascii=False).encode()  # valid text for a client


TRAINING_KINDS = [
    kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, Body)
]


@settings(deadline=None)
@given(st.sampled_from(TRAINING_KINDS), st.data())
def test_a_body_of_the_training_api_is_read_or_refused(kind: type[Body], data: st.DataObject):
    fields = {name: st.just("tiny") | plain for name in kind.model_fields}
    body = data.draw(st.fixed_dictionaries({}, optional=fields))
    error = refusal_of(lambda: read_body(kind, json.dumps(body).encode()), kind=ApiError)
    if error is not None:
        assert 400 <= error.status < 500
        json.dumps(error.body(), ensure_ascii=False).encode()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80) | plain.map(lambda value: json.dumps({"files": value}).encode()))
@example(b'{"files": {"config.json": {"bytes": 99999999999999999999, "xxh3": ""}}}')
@example(b'{"files": {"../../../../../../dev/zero": {"bytes": 0, "xxh3": ""}}}')
def test_the_manifest_of_a_checkpoint_is_read_or_refused(tmp_path: Path, data: bytes):
    (tmp_path / "manifest.json").write_bytes(data)
    assert damage_to(tmp_path) is not None


@pytest.mark.parametrize(
    "line",
    [b'{"token":"\xff"}', b'{"base":' + b"[" * 100_000, b"\x00", b'{"token":"\\ud800"}', b""],
)
def test_a_line_of_a_stranger_does_not_end_the_broadcasts_of_a_trainer(line: bytes):
    server = RendezvousServer("127.0.0.1", num_members={"engine": 1}, timeout_s=20.0)
    with contextlib.closing(server), _connection(server) as stranger, _connection(server) as engine:
        stranger.sendall(line + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        while not select.select([stranger], [], [], 0)[0]:  # until it is disconnected
            server.poll()
        assert _is_admitted(server, engine)


def test_connections_of_strangers_do_not_use_up_the_files_of_a_trainer():
    server = RendezvousServer("127.0.0.1", num_members={"engine": 1}, timeout_s=20.0)
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        before = psutil.Process().num_fds()
        for _ in range(200):
            stack.enter_context(_connection(server))
            server.poll()
        assert psutil.Process().num_fds() - before < 200 + 100  # 200 are of the strangers
        assert _is_admitted(server, stack.enter_context(_connection(server)))


def test_a_stranger_that_speaks_when_it_is_dropped_does_not_end_the_broadcasts_of_a_trainer():
    server = RendezvousServer("127.0.0.1", num_members={"engine": 1}, timeout_s=20.0)
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(_connection(server)) for _ in range(64)]
        while any(server.poll() for _ in range(64)):
            pass
        # One more drops the oldest, whose bytes arrive with it.
        first.sendall(b"x")
        stack.enter_context(_connection(server))
        select.select([], [], [], 0.1)
        while not select.select([first], [], [], 0)[0]:  # until it is disconnected
            server.poll()
        assert _is_admitted(server, stack.enter_context(_connection(server)))


def _connection(server: RendezvousServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port))


def _is_admitted(server: RendezvousServer, engine: socket.socket) -> bool:
    request = TransferRequest(token=server.token, version=1, base=None)
    engine.sendall(msgspec.json.encode(request) + b"\n")
    return any(server.poll() for _ in range(100))
