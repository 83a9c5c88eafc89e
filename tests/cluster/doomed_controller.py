"""A controller for tests: prints the pids of an idle and a busy worker, then waits to be killed."""

import asyncio
import sys
from pathlib import Path

from echo_worker import ask

from millrace.cluster.hub import Hub


async def main(log_dir: Path, *preload: str) -> None:
    async with Hub(
        runtime_dir=log_dir, log_dir=log_dir, on_event=lambda *_: None, preload=preload
    ) as hub:
        idle = await hub.launch("idle", "echo_worker")
        busy = await hub.launch("busy", "echo_worker")
        await busy.call(ask("go deaf"))
        print(idle.pid, busy.pid, flush=True)
        await asyncio.sleep(3600)


asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
