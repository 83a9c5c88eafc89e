"""A run on two hosts, which are network namespaces of this machine: ranks, engines, a cut cable."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from project import Command, make_project, steps_in

ADDRESSES = ("10.211.55.1", "10.211.55.2")
# Packets take 2 ms, and one in a hundred is lost; or, where the kernel has no such queue, they wait
# up to 4 ms for a slow link, and those that would wait longer are lost.
QUEUES = ("netem delay 2ms loss 1%", "tbf rate 20mbit burst 16kb latency 4ms")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Cable:
    """Two hosts, connected by one link with latency and loss in both directions."""

    hosts: tuple[str, str]  # names of namespaces
    ends: tuple[str, str]  # names of interfaces

    def plug(self, state: str) -> None:
        ip("-n", self.hosts[1], "link", "set", self.ends[1], state)

    def slow_down(self) -> None:
        for host, end in zip(self.hosts, self.ends, strict=True):
            add = ["tc", "-n", host, "qdisc", "add", "dev", end, "root"]
            made = (subprocess.run([*add, *queue.split()], check=False) for queue in QUEUES)
            assert any(each.returncode == 0 for each in made)

    def num_lost(self) -> int:
        """Packets from the first host to the second."""
        command = ["tc", "-n", self.hosts[0], "-s", "-j", "qdisc", "show", "dev", self.ends[0]]
        (queue,) = json.loads(subprocess.check_output(command))
        return queue["drops"]


@pytest.fixture
def cable() -> Iterator[Cable]:
    number = os.getpid()
    hosts, ends = (f"mr{number}a", f"mr{number}b"), (f"mr{number}x", f"mr{number}y")
    try:
        for host in hosts:
            ip("netns", "add", host)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end, address in zip(hosts, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
            for name in ("lo", end):
                ip("-n", host, "link", "set", name, "up")
        cable = Cable(hosts=hosts, ends=ends)
        cable.slow_down()
        yield cable
    finally:
        for host in hosts:  # the interfaces go with them
            ip("netns", "del", host)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_and_engines_of_two_hosts_train_and_survive_a_cut_of_their_link(tmp_path, cable):
    project = make_project(
        tmp_path / "controller",
        trainer={"steps": 8, "ranks": 2, "remote": 1},
        optimizer={"learning_rate": 1e-3},
        engine={"count": 1, "remote": 1},
        checkpoint={"every_steps": 2},
        supervision={"hang_timeout_s": 10.0},
        cluster={"address": f"tcp://{ADDRESSES[0]}:0", "ticket": "secret/ticket.json"},
    )
    ticket, metrics = project / "secret" / "ticket.json", project / "run" / "metrics.jsonl"
    here, there = (["ip", "netns", "exec", host] for host in cable.hosts)
    commands = [Command("train", "run.toml", folder=project, within=here)]
    run = commands[0]

    def join(role: str) -> Command:
        """Join as soon as the run has noticed that the place is free."""
        while True:
            host = Command("join", ticket, "--role", role, folder=tmp_path / role, within=there)
            commands.append(host)
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(3)
            if host.process.returncode != 2:
                return host
            assert "The run has 0 free slots" in host.finish()[2]

    try:
        run.wait_for(ticket)
        first = [join(role) for role in ("engine", "trainer")]
        run.wait_for(metrics, lines=2)
        cable.plug("down")
        for host in first:
            code, _, stderr = host.finish()
            assert (code, stderr.count("\n")) == (1, 1), stderr
            assert "was silent for 10.0 s" in stderr
        cable.plug("up")
        second = [join(role) for role in ("engine", "trainer")]
        code, stdout, stderr = run.finish()
        assert code == 0, stdout + stderr
        assert "trainer-1: loading on cpu (" in stdout
        assert [host.finish()[0] for host in second] == [0, 0]
        assert cable.num_lost() > 0
    finally:
        for command in commands:
            if command.process.poll() is None:
                command.process.kill()
            print(command.process.args[-3:], *command.process.communicate())  # shown if it fails
    assert steps_in(metrics) == list(range(1, 9))
    restarts = json.loads((project / "run" / "summary.json").read_text())["restarts"]
    assert restarts == {"engine-1": 1, "trainer": 1}
