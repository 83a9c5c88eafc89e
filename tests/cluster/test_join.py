"""Workers from other hosts, with real processes: how they come in, and every way they end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from echo_worker import ask
from hosts import Host, expect, is_forked, outside_address, write_ticket

from millrace.cluster.address import connect
from millrace.cluster.fork_server import is_supported
from millrace.cluster.hub import Hub
from millrace.cluster.join.host import own_gpus
from millrace.cluster.join.registry import JoinedProcess, JoinRegistry, host_identity
from millrace.cluster.join.ticket import ticket_file
from millrace.cluster.launchers.launcher import HostDevice, Resources
from millrace.cluster.link import EVENT_ID
from millrace.cluster.messages import (
    Done,
    Error,
    GenerateDone,
    Join,
    Message,
    ProcessExit,
    SignalWorker,
    WorkerExited,
)
from millrace.cluster.wire import encode
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError, WorkerError

TIMEOUT_S = 2.0  # of heartbeats


def new_hub(tmp_path: Path, *, address: str = "tcp://127.0.0.1:0", **settings) -> Hub:
    timeouts = {"stop_timeout_s": 4.0, "start_timeout_s": 30.0, "heartbeat_timeout_s": TIMEOUT_S}
    return Hub(
        log_dir=tmp_path / "logs",
        on_event=lambda *_: None,
        address=address,
        **{**timeouts, **settings},
    )


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    async with new_hub(tmp_path) as hub:
        yield hub


@pytest.fixture
async def hosts() -> AsyncIterator[list[Host]]:
    """Put a host here, and it does not outlive the test."""
    hosts: list[Host] = []
    yield hosts
    for host in hosts:
        if host.process.returncode is None:
            host.process.kill()
        await host.process.wait()


async def joined(
    hub: Hub, tmp_path: Path, hosts: list[Host], *, count: int = 1, module: str = "echo_worker"
) -> tuple[Host, list[Worker]]:
    """One host, and the workers it has brought."""
    expected = [expect(hub, f"echo-{i}") for i in range(count)]
    ticket = write_ticket(hub, tmp_path / "ticket.json")
    host = await Host.start(ticket, str(count), module, folder=tmp_path / "elsewhere")
    hosts.append(host)
    return host, await asyncio.gather(*expected)


async def failures_of(worker: Worker, *calls: Message) -> list[str]:
    """What calls say that are pending when the worker ends."""
    pending = [asyncio.create_task(worker.call(call)) for call in calls]
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 15)
    assert all(isinstance(result, WorkerError) for result in results), results
    return [str(result) for result in results]


async def wait_until_dead(*processes: psutil.Process, timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        for process in processes:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_joined_worker_that_hangs_dumps_its_stacks_and_its_host_reports_them(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    _, (worker,) = await joined(hub, tmp_path, hosts)
    await worker.call(ask("sleep"))
    with pytest.raises(WorkerError, match=r"its stacks are in its log, .*elsewhere.* on ") as info:
        await worker.call(ask("echo"), timeout_s=0.1, kill_on_timeout=True)
    assert "in handle" in info.value.traceback
    assert await worker.is_gone_within(10)


@pytest.mark.slow
async def test_stacks_of_a_silent_host_are_awaited_for_a_few_seconds_only(
    tmp_path: Path, hosts: list[Host]
):
    async with new_hub(tmp_path, heartbeat_timeout_s=60.0) as hub:
        host, (worker,) = await joined(hub, tmp_path, hosts)
        host.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match=r"within 0.1 s; its log is on "):
                await worker.call(ask("echo after 9"), timeout_s=0.1, kill_on_timeout=True)
        finally:
            host.process.send_signal(signal.SIGCONT)


def in_time(seconds: float, do, *arguments) -> None:
    asyncio.get_running_loop().call_later(seconds, do, *arguments)


# Coming in


@pytest.mark.parametrize("listen", ["outside", "everywhere", "ipv6"])
async def test_joined_worker_answers_calls_until_the_run_ends(
    tmp_path: Path, hosts: list[Host], listen: str
):
    address = {"everywhere": "tcp://*:0", "ipv6": "tcp://[::1]:0"}.get(listen)
    outside = outside_address()
    advertise = outside if listen == "everywhere" else None
    async with new_hub(
        tmp_path, address=address or f"tcp://{outside}:0", advertise=advertise
    ) as hub:
        local = await hub.launch("local", "echo_worker")
        host, workers = await joined(hub, tmp_path, hosts, count=2)
        assert [worker.name for worker in workers] == ["echo-0", "echo-1"]
        for worker in (local, *workers):
            reply = await worker.call(ask("echo", np.arange(1_000_000)))
            assert isinstance(reply, GenerateDone)
            assert reply.completions[0].tokens[-1] == 999_999
        processes = host.workers()
        assert hub.num_invalid == 0
    code, stdout, stderr = await host.finish()
    assert (code, stderr) == (0, "")
    if listen != "ipv6":
        assert f"Joined the run at tcp://{outside}:" in stdout
    await wait_until_dead(*processes)


@pytest.mark.skipif(not is_supported(), reason="the fork server needs Linux")
@pytest.mark.parametrize("count", [1, 2])
async def test_host_forks_its_workers_if_there_are_several(
    hub: Hub, tmp_path: Path, hosts: list[Host], count: int
):
    host, workers = await joined(hub, tmp_path, hosts, count=count)
    assert [is_forked(process.pid) for process in host.workers()] == [count > 1] * count
    (failure,) = await failures_of(workers[0], ask("exit 3"))
    assert "'echo-0' exited with code 3" in failure
    for other in workers[1:]:
        await other.stop()
    code, _, stderr = await host.finish()
    assert (code, "exited with code 3" in stderr) == (1, True)


async def test_hosts_with_copies_of_one_ticket_get_different_slots(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    expected = [expect(hub, f"echo-{i}") for i in range(2)]
    ticket = write_ticket(hub, tmp_path / "ticket.json")
    for name in ("here", "there"):
        hosts.append(await Host.start(ticket, "1", folder=tmp_path / name))
    workers = await asyncio.gather(*expected)
    replies = await asyncio.gather(*(worker.call(ask("echo")) for worker in workers))
    assert all(isinstance(reply, GenerateDone) for reply in replies)


async def test_more_workers_than_free_slots_are_refused(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    _, (worker,) = await joined(hub, tmp_path, hosts)
    waiting = expect(hub, "echo-1")
    ticket = write_ticket(hub, tmp_path / "ticket.json")
    for count, sentence in (
        (2, "has 1 free slot for engines and 1 taken, but --count = 2"),
        (0, "starts no worker"),
    ):
        greedy = await Host.start(ticket, str(count), folder=tmp_path / f"greedy-{count}")
        code, _, stderr = await greedy.finish()
        assert code == 2
        assert sentence in stderr
        assert len(stderr.splitlines()) == 1
    assert isinstance(await worker.call(ask("echo")), GenerateDone)
    waiting.cancel()


async def test_host_with_other_package_versions_ends_with_one_sentence_and_no_process(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    expected = expect(hub, "echo-0")
    ticket = hub.ticket()
    own, others = ticket.versions["torch"], {**ticket.versions, "torch": "1.0"}
    path = tmp_path / "ticket.json"
    with ticket_file(msgspec.structs.replace(ticket, versions=others), path):
        hosts.append(await Host.start(path, "1", folder=tmp_path / "elsewhere"))
        code, stdout, stderr = await hosts[0].finish()
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert f"torch {own} instead of 1.0, which the run at {ticket.address} has" in stderr
    assert str(hosts[0].folder) not in {p.info["cwd"] for p in psutil.process_iter(["cwd"])}
    assert not expected.done()  # the run waits for another host
    expected.cancel()


async def test_each_joined_worker_gets_gpus_of_its_own_host(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    """Two GPUs for each worker, as with engine.tp = 2; no host has those of the controller."""
    expected = [expect(hub, f"echo-{i}", needs=Resources(gpus=2, or_cpu=True)) for i in range(3)]
    ticket = write_ticket(hub, tmp_path / "ticket.json")

    async def join(name: str, count: int, num_gpus: int) -> Host:
        arguments = (str(count), "echo_worker", "engine", f"GPUS={num_gpus}")
        hosts.append(await Host.start(ticket, *arguments, folder=tmp_path / name))
        return hosts[-1]

    code, _, stderr = await (await join("small", 2, 3)).finish()
    assert code == 2
    assert "2 engines need 4 GPUs, and " in stderr
    assert "has 3; lower --count, or repeat GPUs in --device to share them." in stderr
    code, _, stderr = await (await join("smaller", 1, 1)).finish()
    assert "One engine needs 2 GPUs, and " in stderr
    assert "has 1; run `millrace join` on a host with more, or repeat GPUs in --device" in stderr
    await join("large", 2, 5)
    workers = await asyncio.gather(*expected[:2])
    await join("without", 1, 0)
    workers.append(await expected[2])
    replies = [await worker.call(ask("gpus")) for worker in workers]
    gpus = [r.completions[0].tokens.tolist() for r in replies if isinstance(r, GenerateDone)]
    assert gpus == [[0, 1], [2, 3], []]


async def test_host_without_the_gpus_or_the_memory_for_a_rank_is_refused_in_one_sentence(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    """The GPUs of join_echo have 8 GiB each, its CPU 16 GiB."""
    rank = Resources(gpus=1, device_bytes=6 * 2**30)
    expected = [expect(hub, f"echo-{i}", needs=rank) for i in range(2)]
    ticket = write_ticket(hub, tmp_path / "ticket.json")

    async def refusal(name: str, *variables: str, count: str = "1") -> str:
        arguments = (count, "echo_worker", "engine", *variables)
        code, _, stderr = await (
            await Host.start(ticket, *arguments, folder=tmp_path / name)
        ).finish()
        assert code == 2
        assert len(stderr.splitlines()) == 1
        return stderr

    without = await refusal("without")
    assert "One engine needs 1 GPU, and " in without
    assert without.endswith("has none; run `millrace join` on a host with more.\n")
    assert "2 engines need 2 GPUs, and " in await refusal("two", "GPUS=1", count="2")
    expected.append(expect(hub, "echo-2", needs=Resources(gpus=1, device_bytes=9 * 2**30)))
    large = await refusal("large", "GPUS=3", count="3")
    assert "Device 'cuda:2' of " in large
    assert "has 8.0 GiB, and needs 9.0 GiB for weights and optimizer state alone" in large
    assert "lower --count, or name other GPUs in --device." in large
    arguments = ("2", "echo_worker", "engine", "GPUS=2")
    hosts.append(await Host.start(ticket, *arguments, folder=tmp_path / "fits"))
    workers = await asyncio.gather(*expected[:2])
    assert [device.name for worker in workers for device in worker.devices] == ["cuda:0", "cuda:1"]
    expected[2].cancel()
    on_cpu = [expect(hub, f"cpu-{i}", needs=Resources(device_bytes=10 * 2**30)) for i in range(2)]
    assert "Device 'cpu' of " in await refusal("full", count="2")
    for task in on_cpu:
        task.cancel()


def test_gpus_to_join_with_are_those_that_pytorch_sees_or_those_named():
    def entries(named: str | None, *, num_visible: int, visible: str | None) -> list[str]:
        found = [
            HostDevice(name=f"cuda:{i}", kind="GPU", total_bytes=1) for i in range(num_visible)
        ]
        cpu = HostDevice(name="cpu", kind="2 cores", total_bytes=1)
        return [gpu.entry for gpu in own_gpus(named, found=[*found, cpu], visible=visible)]

    assert entries(None, num_visible=2, visible=None) == ["0", "1"]
    assert entries(None, num_visible=2, visible="GPU-a,5") == ["GPU-a", "5"]
    assert entries("cuda:1,cuda:1", num_visible=2, visible="GPU-a,5") == ["5", "5"]
    assert entries(None, num_visible=0, visible="7") == [], "an index that no GPU has"
    with pytest.raises(ConfigError, match="names 'cuda:2', and PyTorch sees cuda:0, cuda:1 on"):
        entries("cuda:2", num_visible=2, visible=None)


async def test_error_if_no_host_joins_in_time_is_one_sentence(hub: Hub):
    with pytest.raises(WorkerError, match=r"No host joined with 'echo-0' within 0\.1 s"):
        await expect(hub, "echo-0", timeout_s=0.1)
    assert not hub._workers


async def test_a_ticket_of_a_run_that_has_ended_is_one_sentence(tmp_path: Path):
    async with new_hub(tmp_path) as hub:
        ticket, port = write_ticket(hub, tmp_path / "ticket.json"), hub.address
    late = await Host.start(ticket, "1", folder=tmp_path / "late")
    code, _, stderr = await late.finish()
    assert code == 2
    assert f"No run listens at {port}" in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.slow
async def test_a_ticket_of_an_earlier_run_at_the_same_port_is_one_sentence(tmp_path: Path):
    async with new_hub(tmp_path) as hub:
        ticket, address = write_ticket(hub, tmp_path / "ticket.json"), hub.address
    async with new_hub(tmp_path, address=address) as hub:
        waiting = expect(hub, "echo-0")
        late = await Host.start(ticket, "1", folder=tmp_path / "late")
        code, _, stderr = await late.finish()
        assert code == 2
        assert "does not accept this ticket" in stderr
        assert len(stderr.splitlines()) == 1
        assert not waiting.done()
        assert hub.num_invalid == 0
        waiting.cancel()


async def test_joined_worker_that_cannot_start_is_reported_with_its_log(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    with pytest.raises(
        WorkerError, match=r"'echo-0' exited with code 1; its log is .* on "
    ) as info:
        await joined(hub, tmp_path, hosts, module="no_such_module")
    assert "No module named no_such_module" in info.value.traceback
    code, _, stderr = await hosts[0].finish()
    assert code == 1
    assert "exited with code 1" in stderr


async def test_joined_worker_without_hello_is_killed(tmp_path: Path, hosts: list[Host]):
    async with new_hub(tmp_path, start_timeout_s=1.0) as hub:
        with pytest.raises(WorkerError, match=r"did not come up within 1\.0 s"):
            await joined(hub, tmp_path, hosts, module="mute_worker")
    _, _, stderr = await hosts[0].finish()
    assert "was killed by SIGKILL" in stderr


# Ends


async def test_host_starts_a_dead_worker_again_beside_its_others(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    expected = [expect(hub, f"echo-{i}", needs=Resources(gpus=1)) for i in range(2)]
    ticket = write_ticket(hub, tmp_path / "ticket.json")
    variables = ("GPUS=2", "RESTARTS=1")
    host = await Host.start(
        ticket, "2", "echo_worker", "engine", *variables, folder=tmp_path / "elsewhere"
    )
    hosts.append(host)
    other, victim = await asyncio.gather(*expected)
    pid = await other.call(ask("pid"))
    await failures_of(victim, ask("exit 3"))
    await asyncio.sleep(1.5)  # it asks for a place before there is one
    again = await expect(hub, "echo-9", needs=Resources(gpus=1))
    gpus = await again.call(ask("gpus"))
    assert isinstance(gpus, GenerateDone)
    assert gpus.completions[0].tokens.tolist() == [1], "the GPU of the worker before it"
    same = await other.call(ask("pid"))
    assert isinstance(pid, GenerateDone)
    assert isinstance(same, GenerateDone)
    assert same.completions[0].tokens.tolist() == pid.completions[0].tokens.tolist()
    await asyncio.gather(again.stop(), other.stop())
    code, stdout, stderr = await host.finish()
    assert (code, stderr) == (0, "")
    assert "echo-1 exited with code 3" in stdout
    assert "Waiting for a place: The run has 0 free slots for engines and 1 taken" in stdout
    assert "Started echo-9." in stdout


async def test_host_gives_a_dead_worker_up_when_the_run_has_ended(
    tmp_path: Path, hosts: list[Host]
):
    async with new_hub(tmp_path) as hub:
        expected = expect(hub, "echo-0")
        ticket = write_ticket(hub, tmp_path / "ticket.json")
        arguments = (ticket, "1", "echo_worker", "engine", "RESTARTS=1")
        hosts.append(await Host.start(*arguments, folder=tmp_path / "elsewhere"))
        await failures_of(await expected, ask("exit 3"))
    code, stdout, stderr = await hosts[0].finish()
    assert (code, "exited with code 3" in stderr) == (1, True)
    assert "asking the run for its place" in stdout


async def test_joined_worker_that_is_stopped_fails_its_calls_and_is_killed(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    host, (victim, other) = await joined(hub, tmp_path, hosts, count=2)
    process = host.workers()[0]
    in_time(0.1, process.suspend)
    (failure,) = await failures_of(victim, ask("echo after 99"))
    assert f"answered no heartbeat for {TIMEOUT_S} s" in failure
    await wait_until_dead(process)
    assert isinstance(await other.call(ask("echo")), GenerateDone)


async def test_a_host_that_vanishes_fails_the_calls_of_its_workers(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    """All of its processes are stopped: none reports it, and no connection is closed."""
    host, (worker,) = await joined(hub, tmp_path, hosts)
    processes = [psutil.Process(host.process.pid), *host.workers()]
    for process in processes:
        in_time(0.1, process.suspend)
    (failure,) = await failures_of(worker, ask("echo after 99"))
    assert "answered no heartbeat" in failure or "lost its connection" in failure
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # join, back again, may have ended it
            process.resume()
    await wait_until_dead(*processes)  # what comes back late finds its place gone


@pytest.mark.parametrize("restarts", [(), ("RESTARTS=1",)])
async def test_host_whose_controller_is_silent_ends_with_one_sentence(
    hub: Hub, tmp_path: Path, hosts: list[Host], restarts: tuple[str, ...]
):
    expected = expect(hub, "echo-0")
    ticket = write_ticket(hub, tmp_path / "ticket.json")
    arguments = (ticket, "1", "echo_worker", "engine", *restarts)
    hosts.append(await Host.start(*arguments, folder=tmp_path / "elsewhere"))
    await expected
    workers, process = hosts[0].workers(), psutil.Process(hosts[0].process.pid)
    deadline = time.monotonic() + 15
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # noqa: ASYNC251 - the hub sends nothing meanwhile
    code, _, stderr = await hosts[0].finish()
    silent = f"was silent for {TIMEOUT_S} s; the workers on this host were stopped."
    assert (code, stderr.count("\n")) == (1, 1), stderr
    assert stderr.endswith(f"{silent}\n")
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_join_reports_to_the_controller(
    hub: Hub, tmp_path: Path, hosts: list[Host], number: signal.Signals
):
    host, (worker,) = await joined(hub, tmp_path, hosts)
    (process,) = host.workers()
    in_time(0.1, host.process.send_signal, number)
    (failure,) = await failures_of(worker, ask("echo after 99"))
    assert "exited with code 143" in failure
    await wait_until_dead(process)


async def test_worker_with_a_busy_main_thread_answers_heartbeats(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    _, (worker,) = await joined(hub, tmp_path, hosts)
    assert isinstance(await worker.call(ask("sleep")), Done)
    with pytest.raises(WorkerError, match="did not answer Generate within"):
        await worker.call(ask("echo"), timeout_s=2 * TIMEOUT_S)
    assert not worker.dead.done()


async def test_the_hub_ends_a_joined_worker_that_ignores_sigterm(tmp_path: Path, hosts: list[Host]):
    async with new_hub(tmp_path, stop_timeout_s=0.6) as hub:
        host, (worker,) = await joined(hub, tmp_path, hosts)
        processes = host.workers()
        await worker.call(ask("go deaf"))
    await wait_until_dead(*processes)
    _, _, stderr = await host.finish()
    assert "was killed by SIGKILL" in stderr


async def test_a_controller_that_was_busy_does_not_take_joined_workers_for_dead():
    async def echo(_message: Message) -> None:
        asyncio.get_running_loop().call_later(0.01, joined.on_message)

    async def ignore(_message: Message) -> None: ...

    joined = JoinedProcess(
        name="echo-0",
        host="there",
        send_to_worker=echo,
        send_to_host=ignore,
        heartbeat_timeout_s=0.4,
    )
    joined.on_message()
    ended = asyncio.create_task(joined.exited())
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # noqa: ASYNC251 - nothing is read meanwhile
    await asyncio.sleep(0.5)
    assert not ended.done()
    joined.on_exit(ProcessExit(reason="was stopped"))
    assert (await ended).reason == "was stopped"


async def test_process_that_its_host_starts_late_is_killed_all_the_same():
    orders: list[Message] = []

    async def order(message: Message) -> None:
        orders.append(message)
        kills = [each for each in orders if isinstance(each, SignalWorker)]
        if len(kills) == 2:  # the host did not know the process when the first one came
            joined.on_exit(ProcessExit(reason="was killed"))

    async def answer(_message: Message) -> None:
        joined.on_message()

    joined = JoinedProcess(
        name="echo-0",
        host="there",
        send_to_worker=answer,
        send_to_host=order,
        heartbeat_timeout_s=0.4,
    )
    joined.kill()
    ended = await asyncio.wait_for(joined.exited(), 20)
    assert ended.reason == "was killed"


# What a host may say


async def test_host_that_joins_and_vanishes_costs_its_slot_only(hub: Hub, tmp_path: Path):
    worker = await hub.launch("local", "echo_worker")
    waiting = expect(hub, "echo-0")
    ticket = hub.ticket()
    with zmq.Context() as context, context.socket(zmq.DEALER) as host:
        identity = host_identity(ticket.token)
        connect(host, ticket.address, identity=identity, keys=ticket.keys, heartbeat_timeout_s=None)
        await asyncio.sleep(0.5)  # for the handshake, which needs the hub's loop
        host.send_multipart([EVENT_ID, *encode(Join(host="ghost", num_workers=1))])
    time.sleep(0.5)  # noqa: ASYNC251 - it is gone before the hub reads what it wanted
    with pytest.raises(WorkerError, match="'echo-0' lost its connection from ghost"):
        await asyncio.wait_for(waiting, 10)
    assert isinstance(await worker.call(ask("echo"), timeout_s=10), GenerateDone)
    assert hub.num_invalid == 0


async def test_host_can_report_about_its_own_workers_only(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    _, (worker,) = await joined(hub, tmp_path, hosts)
    intruder = f"host:{hub.ticket().token}:intruder".encode()
    ended = WorkerExited(worker="echo-0", exit=ProcessExit(reason="fell asleep"))
    assert not await hub.registry.on_message(intruder, bytes(8), ended)
    assert not await hub.registry.on_message(intruder, bytes(8), Done())
    assert isinstance(await worker.call(ask("echo")), GenerateDone)


async def test_host_is_refused_if_the_wait_for_it_was_cancelled_in_the_same_moment():
    replies = list[Message]()

    async def send(_identity: bytes, _call_id: bytes, message: Message) -> None:
        replies.append(message)

    registry = JoinRegistry(send, heartbeat_timeout_s=TIMEOUT_S)
    waiting = asyncio.create_task(registry.wait_for_host("echo-0", "token", role="engine"))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await registry.on_message(b"host", bytes(8), Join(host="there", num_workers=1))
    (reply,) = replies
    assert isinstance(reply, Error)
    assert "The run has 0 free slots for engines" in reply.reason


async def test_token_of_another_run_is_rejected(hub: Hub, tmp_path: Path):
    async with new_hub(tmp_path) as other:
        assert hub.registry.is_host(f"host:{hub.ticket().token}:1".encode())
        assert not hub.registry.is_host(f"host:{other.ticket().token}:1".encode())
        assert not hub.registry.is_host(b"host:")


# Secrets


def texts_in(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*") if path.is_file()]


async def test_no_log_or_command_line_contains_a_secret(
    hub: Hub, tmp_path: Path, hosts: list[Host]
):
    ticket = hub.ticket()
    host, (worker, other) = await joined(hub, tmp_path, hosts, count=2)
    (tmp_path / "copy-of-ticket.json").unlink()
    processes = [psutil.Process(host.process.pid), *host.workers()]
    commands = [" ".join(process.cmdline()) for process in processes]
    with pytest.raises(WorkerError) as raised:
        await worker.call(ask("raise"))
    await failures_of(other, ask("exit 7"))
    code, stdout, stderr = await host.finish()
    assert code == 1
    texts = texts_in(tmp_path)
    assert any("out of luck" in text for text in texts)
    everything = "\n".join(
        [*texts, *commands, stdout, stderr, str(raised.value), raised.value.traceback]
    )
    tokens = [identity.split(b":")[1].decode() for identity in hub._workers]
    assert len(tokens) == 2
    for secret in (ticket.keys.secret, ticket.token, *tokens):
        assert secret not in everything
