"""A controller for tests whose worker never comes up; it waits for that until it is killed."""

import asyncio
import sys
from pathlib import Path

from millrace.cluster.hub import Hub


async def main(log_dir: Path) -> None:
    async with Hub(runtime_dir=log_dir, log_dir=log_dir, on_event=lambda *_: None) as hub:
        await hub.launch("mute", "mute_worker")


asyncio.run(main(Path(sys.argv[1])))
