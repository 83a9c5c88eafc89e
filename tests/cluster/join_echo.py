"""`millrace join` for tests, with a worker module of choice: TICKET COUNT [MODULE [ROLE
[VARIABLE=VALUE ...]]]. The variable GPUS is the number of GPUs of this host, with 8 GiB each, and
RESTARTS says that it starts dead workers again."""

import sys
from pathlib import Path

from millrace.cli.main import report
from millrace.cluster.join.host import join, own_gpus
from millrace.cluster.join.ticket import read_ticket
from millrace.cluster.launchers.launcher import HostDevice
from millrace.core.errors import MillraceError

path, count, *more = sys.argv[1:]
module, role, *variables = [*more, *("echo_worker", "engine")[len(more) :]]
env = dict(variable.split("=", 1) for variable in variables)
found = range(int(env.get("GPUS", "0")))
gpus = [HostDevice(name=f"cuda:{i}", kind="GPU", total_bytes=2**33) for i in found]
cpu = HostDevice(name="cpu", kind="2 cores", total_bytes=2**34)
try:
    ticket = read_ticket(Path(path))
    join(
        ticket,
        module=module,
        role=role,
        count=int(count),
        log_dir=Path("logs"),
        preload=["numpy"],
        env=env,
        devices=[*own_gpus(None, found=gpus, visible=None), cpu],
        restarts="RESTARTS" in env,
    )
except MillraceError as error:
    sys.exit(report(error))
