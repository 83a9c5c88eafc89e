"""`millrace join` for tests, with a worker module of choice: TICKET COUNT [MODULE]."""

import sys
from pathlib import Path

from millrace.cli.main import report
from millrace.cluster.join.host import join
from millrace.cluster.join.ticket import read_ticket
from millrace.core.errors import MillraceError

path, count, *module = sys.argv[1:]
try:
    ticket = read_ticket(Path(path))
    join(
        ticket,
        module=[*module, "echo_worker"][0],
        count=int(count),
        log_dir=Path("logs"),
        preload=["numpy"],
    )
except MillraceError as error:
    sys.exit(report(error))
