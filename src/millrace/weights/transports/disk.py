"""The disk transport: safetensors files in a directory that trainer and engines share.

    weights/version_12/model.safetensors    every tensor, in the engine's dtype
    weights/version_12/delta.safetensors    the change from an earlier version, with "delta"
    weights/version_12/update.json          the manifest; it is the commit marker, written last

Promise: a folder with update.json is complete and on the disk: all other files are synced before
update.json is renamed into place. Folders of a killed trainer have no marker; engines ignore them,
and the next trainer that uses the directory removes them. A released version is removed. One
trainer at a time uses a directory.
"""

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from millrace.core import files as storage
from millrace.core.errors import WeightError
from millrace.core.records import Delta, WeightUpdate
from millrace.weights import packing
from millrace.weights.backends import Fetched, Memory, NoSpace, RecvBackend, SendBackend, Staging

MODEL_FILE, DELTA_FILE, MARKER = "model.safetensors", "delta.safetensors", "update.json"
_POLL_S = 0.02


class DiskSendBackend(SendBackend):
    transport = "disk"

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._remove_all()

    def allocate(self, num_bytes: int, *, device: torch.device) -> Memory:
        return Memory(num_bytes, device=torch.device("cpu"))

    def offer(self, update: WeightUpdate, *, payload: Memory, delta: Memory | None) -> WeightUpdate:
        folder = self._folder(update.version)
        spec = update.delta and replace(update.delta, location=str(folder / DELTA_FILE))
        update = replace(update, location=str(folder / MODEL_FILE), delta=spec)
        try:
            folder.mkdir(parents=True)
            save_file(packing.unpack(update.tensors, payload.flat), folder / MODEL_FILE)
            if delta is not None:
                save_file({"delta": delta.flat}, folder / DELTA_FILE)
            hidden = folder / f".{MARKER}"
            hidden.write_bytes(msgspec.json.encode(update))
            storage.sync_all(folder)
            hidden.rename(folder / MARKER)
            storage.sync(folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise NoSpace(
                f"Version {update.version} could not be written to {str(self._directory)!r}"
                f" ({storage.reason(error)}): it needs {update.num_bytes / 1e6:.3g} MB; free space"
                " there, or set weights.directory to another disk."
            ) from error
        return update

    def withdraw(self, version: int) -> None:
        _remove(self._folder(version))

    def close(self) -> None:
        self._remove_all()
        if self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()

    def _folder(self, version: int) -> Path:
        return self._directory / f"version_{version}"

    def _remove_all(self) -> None:
        """Remove all versions; those of an earlier trainer would be mistaken for ours."""
        if not self._directory.is_dir():
            return
        for folder in self._directory.iterdir():
            if re.fullmatch(r"version_\d+", folder.name):
                _remove(folder)


class DiskRecvBackend(RecvBackend):
    def __init__(self, *, patience_s: float = 5.0) -> None:
        """`patience_s`: time for a marker to appear; network filesystems lag."""
        self._patience_s = patience_s

    def fetch(self, update: WeightUpdate, *, delta: Delta | None, staging: Staging) -> Fetched:
        marker = Path(update.location).parent / MARKER
        deadline_s = time.monotonic() + self._patience_s
        while not marker.is_file():
            if time.monotonic() >= deadline_s:
                raise WeightError(
                    f"Version {update.version} is not complete at {str(marker.parent)!r}; engines"
                    " must see the trainer's weights.directory under the same path."
                )
            time.sleep(_POLL_S)
        if delta is not None:
            blob = torch.empty(delta.num_bytes, dtype=torch.uint8)
            _read(Path(delta.location), into={"delta": blob})
            return Fetched(blob, "delta")
        payload = staging.take(update)
        _read(Path(update.location), into=packing.unpack(update.tensors, payload))
        return Fetched(payload, "staged")


def _remove(folder: Path) -> None:
    # The marker is removed first: without it the folder is not a version.
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _read(path: Path, *, into: dict[str, torch.Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name, tensor in into.items():
                stored = file.get_tensor(name)
                if (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype):
                    raise WeightError(f"{str(path)!r} has {name!r} in a different shape or type.")
                tensor.copy_(stored)
    except (OSError, SafetensorError) as error:
        raise WeightError(
            f"The weights at {str(path)!r} are damaged or missing ({storage.reason(error)});"
            " the engine keeps the weights it has."
        ) from error
