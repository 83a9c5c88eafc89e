"""The trainer's state at one version, copied to the host and written while training continues.

Promise: a checkpoint holds the state as it was when its snapshot was made, whatever the trainer has
learned since. One snapshot exists at a time. Of a sharded model, each rank copies and writes its
own parts, and no rank holds more than that and some layers: rank 0 makes the Hugging Face directory
from the files of all ranks, layer by layer.

Threads: the trainer's thread makes a snapshot and calls the CheckpointWriter, which starts a thread
per checkpoint. That thread writes the snapshot and reports the result exactly once.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from millrace.core.errors import CheckpointError
from millrace.models.loading import write_model, write_model_parts
from millrace.training.checkpoints.directory import prune_checkpoints, write_checkpoint
from millrace.training.checkpoints.shards import ShardReader, own_parts, write_parts
from millrace.training.parallel.ranks import Ranks

STATE_FILE = "trainer_state.pt"
OPTIMIZER = "optimizer"  # subfolder with the sharded tensors of its state
# Format of the trainer state. In format 3, sharded tensors and the critic are in files of their
# own, which ranks write in parts; formats 1 and 2 have whole tensors. Format 2 names the parameters
# of the optimizer's state, format 1 has numbers. States without a format are read as format 1.
STATE_FORMAT = 3
_WEIGHTS = "weights"  # subfolder with the parts of a model that is not a directory of its own yet

Write = Callable[[Path], None]  # writes what it holds a copy of into a folder
Parts = dict[str, dict[str, Tensor]]  # what one rank has of sharded tensors, by subfolder and name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainerSnapshot:
    state: Mapping[str, Any]  # optimizer and the like; plain values and tensors on the host
    writers: tuple[Write, ...]  # of what rank 0 writes when all parts are written
    parts: Parts = field(default_factory=dict[str, dict[str, Tensor]])

    def write(self, folder: Path, ranks: Ranks | None = None) -> None:
        """Write everything that the ranks have; all of them call this."""
        ranks = ranks or Ranks()

        def write_own_parts() -> None:
            for name, parts in self.parts.items():
                write_parts(folder / name, parts, rank=ranks.rank)

        ranks.together(write_own_parts)
        self.parts.clear()  # rank 0 needs the memory
        if ranks.rank > 0:
            return
        for write in self.writers:
            write(folder)
        # torch.save gets a file object: given a path, it keeps other threads from running, and
        # loses the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(self.state, file)


def model_writer(
    model: PreTrainedModel, weights: Mapping[str, Tensor], parts: Parts, *, subfolder: str = ""
) -> Write:
    """A function that writes a copy of the weights as a Hugging Face directory. If they are
    sharded, this rank's part of them is added to the `parts` of the snapshot instead."""
    if not any(isinstance(weight, DTensor) for weight in weights.values()):
        copied = host_copy(weights)
        return lambda folder: write_model(model, copied, folder / subfolder)
    names: dict[int, str] = {}  # of tied weights, the first
    for name, weight in weights.items():
        names.setdefault(id(weight), name)
    temporary = str(Path(subfolder) / _WEIGHTS)
    parts[temporary] = own_parts({name: weights[name] for name in names.values()})

    def write(folder: Path) -> None:
        tensors = ShardReader(folder / temporary).whole_tensors()
        write_model_parts(model, tensors, folder / subfolder)
        shutil.rmtree(folder / temporary)

    return write


class CheckpointWriter:
    def __init__(self, *, keep: int, ranks: Ranks) -> None:
        """`ranks` are used by the thread that writes."""
        self._keep = keep
        self._ranks = ranks
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
        nothing written or changed, or else with a complaint about old ones it cannot remove. With
        several ranks, the thread of rank 0 is the last to end."""

        def work() -> None:
            error = complaint = None
            self._good.discard(directory.name)
            try:
                write_checkpoint(
                    directory,
                    write=write,
                    run_state=run_state,
                    needed_bytes=needed_bytes,
                    ranks=self._ranks,
                )
            except Exception as failure:  # noqa: BLE001 - the caller's process raises it
                error = failure
            if error is None and self._ranks.rank == 0:
                self._good.add(directory.name)
                try:
                    prune_checkpoints(directory.parent, keep=self._keep, good=self._good)
                except CheckpointError as failure:
                    complaint = str(failure)
            on_done(error, complaint)

        self.wait()
        # The thread is no daemon: a process that exits finishes its checkpoint first.
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
    """The same dicts, lists and tuples with host copies of their tensors; tied ones stay tied.
    Sharded ones become tensors without values, on the device "meta"."""
    known: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if is_traceable_wrapper_subclass(value):  # quantized; has no memory of its own
            return transform_subclass(value, lambda _, inner: copied(inner))
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or key not in known:  # empty tensors share the address 0
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]

    return tree_map(copied, tree)
