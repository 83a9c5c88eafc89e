"""A controller for tests that waits for an echo worker from another host, then to be killed."""

import asyncio
import sys
from pathlib import Path

from echo_worker import ask

from millrace.cluster.hub import Hub
from millrace.cluster.join.ticket import ticket_file


async def main(folder: Path) -> None:
    async with Hub(
        log_dir=folder,
        on_event=lambda *_: None,
        address="tcp://127.0.0.1:0",
        heartbeat_timeout_s=2.0,
    ) as hub:
        with ticket_file(hub.ticket(), folder / "ticket.json"):
            worker = await hub.await_joined("echo-0", timeout_s=60)
            await worker.call(ask("go deaf"))
            print("ready", flush=True)
            await asyncio.sleep(3600)


asyncio.run(main(Path(sys.argv[1])))
