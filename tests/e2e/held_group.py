"""A reward that holds back the first group that it gets until the trainer has a certain version.

So a run shows at what staleness a slow group is trained, dropped or cancelled, on any machine.
"""

import asyncio
from pathlib import Path
from typing import Any

from digits import share_of_digits


async def digits_late(
    completions: list[str], folder: list[str], held_until: list[int], **columns: Any
) -> list[float]:
    """`held_until`: the version; 0 = hold nothing."""
    if held_until[0]:
        try:
            (Path(folder[0]) / "held").touch(exist_ok=False)
        except FileExistsError:  # another group is the first
            pass
        else:
            version = version_file(folder[0], held_until[0])
            while not version.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.005)
    return share_of_digits(completions)


def version_file(folder: str | Path, version: int) -> Path:
    """Exists once the trainer has this version."""
    return Path(folder) / f"version_{version}"
