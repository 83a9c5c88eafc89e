"""A controller for tests: starts MPS, says so, and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from millrace.cluster.mps import shared_gpu


async def main(log: Path, gpu: Path) -> None:
    async with shared_gpu("mps", num_cuda_workers=2, log=log, warn=print, gpu_files=[gpu]):
        print("up", flush=True)
        await asyncio.sleep(3600)


asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
