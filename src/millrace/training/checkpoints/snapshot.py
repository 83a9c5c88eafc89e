"""The trainer's state at one version, copied to the host and written while training continues.

Promise: a checkpoint holds the state as it was when its snapshot was made, whatever the trainer has
learned since. One snapshot exists at a time.

Threads: the trainer's thread makes a snapshot and calls the CheckpointWriter, which starts a thread
per checkpoint. That thread writes the snapshot and reports the result exactly once.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_map

from millrace.core.errors import CheckpointError
from millrace.models.sharding import gathered
from millrace.training.checkpoints.directory import prune_checkpoints, write_checkpoint

STATE_FILE = "trainer_state.pt"
# Format of the trainer state. Format 2 names the parameters of the optimizer's state, format 1 has
# numbers. States without a format are read as format 1.
STATE_FORMAT = 2

Write = Callable[[Path], None]  # writes what it holds a copy of into a folder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainerSnapshot:
    state: Mapping[str, Any]  # optimizer and the like; plain values and tensors on the host
    writers: tuple[Write, ...]  # of weights

    def write(self, folder: Path) -> None:
        for write in self.writers:
            write(folder)
        # To a file object: given a path, torch.save keeps other threads from running, and loses
        # the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(self.state, file)


class CheckpointWriter:
    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._good: set[str] = set()  # step_N known to be undamaged; used by the thread only
        self._thread: threading.Thread | None = None

    def begin(
        self,
        directory: Path,
        *,
        write: Write,
        run_state: dict[str, Any],
        needed_bytes: int,
        on_done: Callable[[BaseException | None, str | None], None],
    ) -> None:
        """Start a thread that fills `directory` with what `write` puts into a folder and with the
        run state, and removes old checkpoints. It then calls `on_done` with the error that left
        nothing written or changed, or else with a complaint about old ones it cannot remove."""

        def work() -> None:
            error = complaint = None
            self._good.discard(directory.name)
            try:
                write_checkpoint(
                    directory, write=write, run_state=run_state, needed_bytes=needed_bytes
                )
            except Exception as failure:  # noqa: BLE001 - the caller's process raises it
                error = failure
            else:
                self._good.add(directory.name)
                try:
                    prune_checkpoints(directory.parent, keep=self._keep, good=self._good)
                except CheckpointError as failure:
                    complaint = str(failure)
            on_done(error, complaint)

        self.wait()
        # Not a daemon: a process that exits finishes its checkpoint first.
        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Block until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def load_state(folder: Path) -> dict[str, Any]:
    """The trainer state in a checkpoint; refuses one that a later version of Millrace wrote."""
    # Mapped: a rank reads its own part of the optimizer's state only.
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True, mmap=True)
    found = state.get("format", 0)
    if found > STATE_FORMAT:
        raise CheckpointError(
            f"The trainer state in {str(folder)!r} has format {found}, and this version of Millrace"
            f" reads formats up to {STATE_FORMAT}; resume with the version that wrote it."
        )
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def host_copy(tree: Any) -> Any:
    """The same dicts, lists and tuples with host copies of their tensors; tied ones stay tied. All
    ranks call it together: rank 0 gets sharded tensors whole, the others get empty ones."""
    known: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            if id(value) not in known:
                known[id(value)] = gathered(value)
            return known[id(value)]
        if is_traceable_wrapper_subclass(value):  # quantized; has no memory of its own
            return transform_subclass(value, lambda _, inner: copied(inner))
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or key not in known:  # empty tensors share the address 0
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]

    return tree_map(copied, tree)
