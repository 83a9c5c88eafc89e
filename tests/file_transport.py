"""The smallest transport of a user: one file of raw bytes for each version."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.weights.backends import (
    Fetched,
    Memory,
    RecvBackend,
    SendBackend,
    Staging,
    Transport,
)


class FileSender(SendBackend):
    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._directory.mkdir(parents=True, exist_ok=True)

    def allocate(self, num_bytes: int, *, device: torch.device) -> Memory:
        return Memory(num_bytes, device=torch.device("cpu"))

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        path = self._path(update.version)
        path.write_bytes(payload.flat.numpy().data)
        return replace(update, location=str(path))

    def withdraw(self, version: int) -> None:
        self._path(version).unlink(missing_ok=True)

    def close(self) -> None:
        for path in self._directory.glob("version_*.bin"):
            path.unlink()

    def _path(self, version: int) -> Path:
        return self._directory / f"version_{version}.bin"


class FileReceiver(RecvBackend):
    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        payload = staging.take(update)
        try:
            found = np.fromfile(update.location, np.uint8)
        except OSError as error:
            raise WeightError(f"Version {update.version}: {error.strerror}.") from error
        if len(found) != len(payload):
            raise WeightError(f"Version {update.version} has {len(found)} bytes.")
        payload.numpy()[:] = found
        return Fetched(payload, "staged")


class FileTransport(Transport):
    def sender(self, *, directory: Path) -> SendBackend:
        return FileSender(directory)

    def receiver(self, *, device: torch.device) -> RecvBackend:
        return FileReceiver()
