import asyncio
import stat
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop
import zmq
from echo_worker import ask

from millrace.cluster.hub import Hub
from millrace.cluster.join.registry import JoinRegistry, host_identity
from millrace.cluster.launchers.launcher import Launcher, ProcessExit, WorkerProcess, WorkerSpec
from millrace.cluster.messages import (
    Done,
    GenerateDone,
    Hello,
    Message,
    Part,
    Release,
    WorkerProgress,
)
from millrace.cluster.wire import WireError, encode
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, RunFailed, ScoreError, WorkerError

Events = list[tuple[str, Message]]


def tokens_of(reply: Message) -> np.ndarray:
    assert isinstance(reply, GenerateDone)
    return reply.completions[0].tokens


def ignore(_worker: str, _message: Message) -> None: ...


def greetings(events: Events) -> list[tuple[str, int]]:
    """Name and pid of every Hello; there must be no other event."""
    assert all(isinstance(event, Hello) for _, event in events)
    return [(name, event.pid) for name, event in events if isinstance(event, Hello)]


async def test_a_worker_answers_a_call(hub: Hub, events: Events):
    worker = await hub.launch("echo-0", "echo_worker")
    reply = await worker.call(ask("echo", np.array([3, 1, 4], dtype=np.int32)))
    np.testing.assert_array_equal(tokens_of(reply), [3, 1, 4])
    assert greetings(events) == [("echo-0", worker.pid)]


async def test_overlapping_calls_get_their_own_replies(hub: Hub):
    workers = await asyncio.gather(*(hub.launch(f"echo-{i}", "echo_worker") for i in range(2)))
    delays = [0.2, 0.0, 0.1, 0.0]
    calls = [
        worker.call(ask(f"echo after {delay}", np.array([number, index])))
        for number, worker in enumerate(workers)
        for index, delay in enumerate(delays)
    ]
    replies = [tokens_of(reply).tolist() for reply in await asyncio.gather(*calls)]
    assert replies == [[number, index] for number in range(2) for index in range(len(delays))]


async def test_a_thousand_calls_at_once_are_all_answered(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    calls = [worker.call(ask("echo", np.array([index]))) for index in range(1000)]
    replies = await asyncio.gather(*calls)
    assert [int(tokens_of(reply)[0]) for reply in replies] == list(range(1000))


@pytest.mark.parametrize("address", ["auto", "tcp://localhost:0"])
async def test_a_hundred_megabytes_pass_both_ways(tmp_path: Path, address: str):
    async with Hub(log_dir=tmp_path, on_event=ignore, address=address) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        tokens = np.arange(25_000_000, dtype=np.int32)
        np.testing.assert_array_equal(tokens_of(await worker.call(ask("echo", tokens))), tokens)


async def test_events_arrive_in_the_order_they_were_emitted(hub: Hub, events: Events):
    worker = await hub.launch("echo-0", "echo_worker")
    await worker.call(ask("emit 3000"))  # more than all queues on the way hold
    counts = [m.counters["number"] for _, m in events if isinstance(m, WorkerProgress)]
    assert counts == list(range(3000))


async def test_parts_of_an_answer_arrive_in_order_before_it_and_at_their_own_call(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    received: dict[int, list[int]] = {3: [], 3000: []}  # more than all queues on the way hold

    def listen(count: int):
        return lambda part: received[count].extend(piece.member for piece in part.pieces)

    calls = [worker.call(ask(f"tell {count}"), on_part=listen(count)) for count in received]
    await asyncio.gather(*calls)
    assert received == {count: list(range(count)) for count in received}


async def test_error_in_a_part_callback_ends_that_call_only(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")

    def refuse(_part: Part) -> None:
        raise ValueError("enough")

    other = asyncio.create_task(worker.call(ask("echo after 0.1")))
    with pytest.raises(ValueError, match="enough"):
        await worker.call(ask("tell 3"), on_part=refuse)
    assert tokens_of(await other).size == 4
    await worker.call(ask("tell 2"))  # without a listener, parts are counted
    assert hub.num_unclaimed == 2 + 3  # and of the first, two parts and the reply


async def test_a_workers_own_error_is_raised_as_its_class(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    with pytest.raises(ScoreError) as info:
        await worker.call(ask("fail"))
    assert str(info.value) == "The reward is NaN."
    assert tokens_of(await worker.call(ask("echo"))).size == 4


async def test_any_other_exception_is_a_worker_error_with_its_traceback(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    with pytest.raises(
        WorkerError, match="'echo-0' failed at Generate: KeyError: 'missing'"
    ) as info:
        await worker.call(ask("stumble"))
    assert 'raise KeyError("missing")' in info.value.traceback
    with pytest.raises(WorkerError, match="echo-0 does not know Release"):
        await worker.call(Release(version=1))
    assert not worker.dead.done()


async def test_message_that_cannot_be_encoded_fails_its_call_only(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    with pytest.raises(WireError):
        await worker.call(ask("echo", np.array([object()])))
    assert tokens_of(await worker.call(ask("echo"))).size == 4


async def test_a_call_that_times_out_names_worker_and_message(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    with pytest.raises(WorkerError, match=r"'echo-0' did not answer Generate within 0\.05 s"):
        await worker.call(ask("echo after 0.3"), timeout_s=0.05)


async def test_late_replies_to_cancelled_calls_are_counted_and_dropped(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    calls = [asyncio.create_task(worker.call(ask("echo after 0.2"))) for _ in range(5)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    assert all(
        isinstance(result, asyncio.CancelledError)
        for result in await asyncio.gather(*calls, return_exceptions=True)
    )
    await worker.call(ask("echo after 0.4"))
    assert hub.num_unclaimed == 5
    assert not worker._waiting


async def test_invalid_messages_and_unknown_senders_are_counted_and_dropped(hub: Hub):
    worker = await hub.launch("echo-0", "echo_worker")
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(hub.address)
        hello = encode(Hello(worker="echo-0", pid=1))
        for frames in ([b""], [b"\xff" * 100], [bytes(8), *hello], [b"x"] * 50):
            stranger.send_multipart(frames)
        while hub.num_invalid < 4:  # noqa: ASYNC110 - the hub only counts them
            await asyncio.sleep(0.01)
    assert tokens_of(await worker.call(ask("echo"))).size == 4


async def test_unknown_sender_cannot_pose_as_a_worker(hub: Hub, events: Events):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.ROUTING_ID, b"echo-0:")
        stranger.connect(hub.address)
        stranger.send_multipart([bytes(8), *encode(Hello(worker="echo-0", pid=1))])
        worker = await hub.launch("echo-0", "echo_worker")
        assert tokens_of(await worker.call(ask("echo"))).size == 4
    assert greetings(events) == [("echo-0", worker.pid)]


async def test_garbage_from_a_known_worker_is_counted_and_dropped(hub: Hub):
    worker = await hub.launch("garbler", "garbling_worker")
    assert isinstance(await worker.call(Release(version=1)), Done)
    assert (hub.num_invalid, hub.num_unclaimed) == (4, 1)
    worker.kill()


async def test_an_error_in_the_event_handler_fails_the_worker_it_came_from(tmp_path: Path):
    def refuse_progress(_worker: str, message: Message) -> None:
        if isinstance(message, WorkerProgress):
            raise ZeroDivisionError("no such metric")

    async with Hub(log_dir=tmp_path, on_event=refuse_progress) as hub:
        worker = await hub.launch("echo-0", "echo_worker")
        with pytest.raises(
            WorkerError, match="sent WorkerProgress, which could not be handled"
        ) as info:
            await worker.call(ask("emit 1"))
    assert "no such metric" in info.value.traceback


async def test_an_error_of_the_hub_itself_fails_all_workers_and_ends_the_run(hub: Hub):
    class FailingRegistry(JoinRegistry):
        async def on_message(self, host: bytes, call_id: bytes, message: Message) -> bool:
            raise ZeroDivisionError("no such host")

    hub.registry = FailingRegistry(hub._send, heartbeat_timeout_s=30.0)
    worker = await hub.launch("echo-0", "echo_worker")
    call = asyncio.create_task(worker.call(ask("echo after 60")))
    with zmq.Context() as context, context.socket(zmq.DEALER) as host:
        host.setsockopt(zmq.ROUTING_ID, host_identity(hub.registry.token))
        host.connect(hub.address)
        host.send_multipart([bytes(8), *encode(Done())])
        with pytest.raises(WorkerError, match="because the hub failed: ZeroDivisionError"):
            await asyncio.wait_for(call, 10)
    assert await worker.is_gone_within(10)
    with pytest.raises(RunFailed, match=r"The hub failed: .*no such host"):
        await hub.launch("echo-1", "echo_worker")


def test_invalid_address_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not an address"):
        Hub(log_dir=tmp_path, on_event=ignore, address="localhost:5000")


async def test_an_address_of_another_machine_is_refused_with_a_sentence(tmp_path: Path):
    for host in ("203.0.113.1", "no-such-interface"):
        with pytest.raises(ConfigError, match=f"Cannot listen at .*{host}.*choose another"):
            await Hub(log_dir=tmp_path, on_event=ignore, address=f"tcp://{host}:0").__aenter__()


async def test_a_port_in_use_is_refused_with_a_sentence(tmp_path: Path):
    async with Hub(log_dir=tmp_path, on_event=ignore, address="tcp://127.0.0.1:0") as hub:
        with pytest.raises(ConfigError, match=r"Cannot listen at cluster\.address"):
            await Hub(log_dir=tmp_path, on_event=ignore, address=hub.address).__aenter__()


async def test_a_socket_path_that_is_too_long_is_refused_and_removed(tmp_path: Path):
    runtime_dir = tmp_path / ("x" * 100)
    runtime_dir.mkdir()
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter folder"):
        await Hub(runtime_dir=runtime_dir, log_dir=tmp_path, on_event=ignore).__aenter__()
    assert not list(runtime_dir.iterdir())


async def test_the_socket_is_private_and_removed_in_the_end(tmp_path: Path):
    async with Hub(runtime_dir=tmp_path, log_dir=tmp_path, on_event=ignore) as hub:
        path = Path(hub.address.removeprefix("ipc://"))
        assert path.parent.parent == tmp_path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


@pytest.mark.parametrize("address", ["auto", "tcp://localhost:0"])
def test_a_hub_runs_on_uvloop_and_leaves_nothing_open(tmp_path: Path, address: str):
    async def run() -> int | None:
        async with Hub(log_dir=tmp_path, on_event=ignore, address=address) as hub:
            worker = await hub.launch("echo-0", "echo_worker")
            assert tokens_of(await worker.call(ask("zeros 1000000"))).size == 1_000_000
            with pytest.raises(WorkerError, match="exited with code 9"):
                await worker.call(ask("exit 9"))
            other = await hub.launch("echo-1", "echo_worker")
            return other.pid

    uvloop.run(run())
    num_fds = psutil.Process().num_fds()
    pid = uvloop.run(run())
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert psutil.Process().num_fds() <= num_fds


async def test_failed_launch_keeps_its_reason_although_another_begins_meanwhile(tmp_path: Path):
    class Ended(WorkerProcess):
        async def exited(self) -> ProcessExit:
            return ProcessExit(reason="ended at once")

        def kill(self) -> None:
            if not second:
                second.append(asyncio.create_task(launch("second")))

    class Ending(Launcher):
        async def start(self, spec: WorkerSpec) -> WorkerProcess:
            return Ended()

    async def launch(name: str) -> None:
        with pytest.raises(WorkerError, match=f"'{name}' ended at once"):
            await hub.launch(name, "", launcher=Ending())

    second: list[asyncio.Task[None]] = []
    async with Hub(log_dir=tmp_path, on_event=ignore) as hub:
        await launch("first")
        await second[0]


async def test_hung_worker_ends_although_its_caller_stops_waiting():
    class Stuck(WorkerProcess):
        async def exited(self) -> ProcessExit:
            await ended.wait()
            return ProcessExit(reason="was killed", code=-9)

        def kill(self) -> None:
            ended.set()

        async def dump_stacks(self) -> tuple[str, str]:
            dumping.set()
            await asyncio.Event().wait()
            raise AssertionError("it never writes them")

    async def send(_id: bytes, _message: Message) -> None: ...

    ended, dumping = asyncio.Event(), asyncio.Event()
    worker = Worker("engine-0", send=send, stop_timeout_s=1.0)
    worker.on_event(Hello(worker="engine-0", pid=1, address="127.0.0.1", free_port=1))
    await worker.start(Stuck(), timeout_s=1.0)
    failing = asyncio.create_task(worker.fail_hung("made no progress"))
    await dumping.wait()
    failing.cancel()
    await asyncio.wait({failing})
    assert ended.is_set()
    assert await worker.is_gone_within(1.0)
    with pytest.raises(WorkerError, match="'engine-0' made no progress"):
        await worker.call(Done())
