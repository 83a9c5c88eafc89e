"""What a placed run would start where, and what it needs there: for people, and for programs."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from millrace.cluster.launchers.launcher import HostDevice
from millrace.config import RunConfig
from millrace.run.placement import ELSEWHERE, GIB, PlacedProcess, needed_bytes


def placement_lines(
    processes: Sequence[PlacedProcess], devices: Sequence[HostDevice]
) -> Iterator[str]:
    """What runs where, and what it needs at least, for people."""
    found = {d.name: f"{d.name}: {d.kind}, {d.total_bytes / GIB:.1f} GiB" for d in devices}
    if any(process.device == ELSEWHERE for process in processes):
        found[ELSEWHERE] = "other hosts, which choose the devices when they join:"
    for device, line in found.items():
        here = [process for process in processes if process.device == device]
        yield line
        for process in here:
            yield f"  {process.name:<20} {process.min_bytes / GIB:6.1f} GiB {process.more}".rstrip()
        if not here and device != "cpu":
            yield "  not used"


def cluster_lines(config: RunConfig, processes: Sequence[PlacedProcess]) -> Iterator[str]:
    """What another launcher than that of this host is asked to start, for people."""
    num_devices = Counter(process.name for process in processes)
    rows = Counter[tuple[str, int | None, int, str]]()
    for process in {process.name: process for process in processes}.values():
        role, gpus = re.sub(r"-\d+$", "", process.name), num_devices[process.name]
        memory = f"{process.min_bytes / GIB:6.1f} GiB {process.more}"
        rows[role, config.cluster.threads, 0 if process.device == "cpu" else gpus, memory] += 1
    if config.environment.remote:
        rows["environment", 1, 0, ""] = config.environment.remote
    yield f"cluster.launcher = {config.cluster.launcher['type']!r} chooses hosts and devices of:"
    yield f"  {'role':<18} number  CPUs  GPUs  memory of each device"
    for (role, cpus, gpus, memory), count in rows.items():
        yield f"  {role:<18} {count:>6} {cpus:>5} {gpus:>5}  {memory}".rstrip()


def placement_table(processes: Sequence[PlacedProcess]) -> dict[str, Any]:
    """What runs where, and what it needs at least, for programs."""
    placement: dict[str, list[str]] = {}  # an engine of several GPUs is listed for each
    by_device: dict[str, list[PlacedProcess]] = {}
    for process in processes:
        placement.setdefault(process.name, []).append(process.device)
        by_device.setdefault(process.device, []).append(process)
    return {
        "placement": placement,
        "memory_bytes_per_device": {name: needed_bytes(p) for name, p in by_device.items()},
        "processes": [asdict(process) for process in processes],
    }
