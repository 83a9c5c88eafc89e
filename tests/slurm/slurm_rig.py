"""A SLURM of its own on this machine: munged, slurmctld and one slurmd for each node.

Each node has two GPUs that are /dev/null: SLURM allocates them and sets CUDA_VISIBLE_DEVICES, and
no program can use them.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser={user}
AuthType=auth/munge
# A requeued job starts when the credentials of its last start have expired, in seconds.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,requeue_delay=0
SlurmdParameters=config_overrides
KillWait=30
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
GPUS = """\
AutoDetect=off
NodeName=node[0-{last}] Name=gpu File={folder}/gpu[0-1]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], *, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.2)


class Slurm:
    def __init__(self, folder: Path, *, num_nodes: int) -> None:
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4"
            " Gres=gpu:2"
            for i in range(num_nodes)
        ]
        text = CONFIG.format(
            host=f"{host}(127.0.0.1)",
            port=free_port(),
            user=getpass.getuser(),
            folder=folder,
            nodes="\n".join(nodes),
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(GPUS.format(last=num_nodes - 1, folder=folder))
        for i in range(2):
            (folder / f"gpu{i}").symlink_to("/dev/null")  # slurmd wants devices
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._start_munge()
        self._start("slurmctld", "-D", "-c")
        for i in range(num_nodes):
            (folder / f"spool-node{i}").mkdir()
            self._start("slurmd", "-D", "-N", f"node{i}")
        ready = f"{num_nodes}"
        wait_until(lambda: self._idle() == ready, what="idle nodes")

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path) -> str:
        """The id of the job."""
        return self.run("sbatch", "--parsable", str(script))

    def field(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)[name]

    def close(self) -> None:
        """End all jobs, then the daemons."""
        self.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
        self.run("scancel", f"--user={getpass.getuser()}")
        wait_until(lambda: self.run("squeue", "--noheader") == "", what="empty queue")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)

    def _idle(self) -> str:
        done = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def _start_munge(self) -> None:
        key, socket_path = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        paths = {
            "key-file": key,
            "socket": socket_path,
            "pid-file": self.folder / "munge.pid",
            "log-file": self.folder / "munge.log",
            "seed-file": self.folder / "munge.seed",
        }
        self._start("munged", "-F", "-f", *(f"--{name}={path}" for name, path in paths.items()))
        wait_until(socket_path.exists, what="munge socket")

    def _start(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, f"{name} is not installed"
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen([program, *arguments], env=self.env, stdout=log, stderr=log)
            )
