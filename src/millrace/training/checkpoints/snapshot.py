"""The trainer's state at one version, copied to the host so that training can continue.

Promise: write() writes the state as it was when the snapshot was made, whatever the trainer has
learned since. The trainer's thread makes a snapshot; any thread may write it, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.core.errors import CheckpointError

STATE_FILE = "trainer_state.pt"
# Format of the trainer state. States without a number are of format 0, which is read the same way.
STATE_FORMAT = 1

Write = Callable[[Path], None]  # writes what it holds a copy of into a folder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainerSnapshot:
    version: int
    state: Mapping[str, Any]  # optimizer and the like; plain values and tensors on the host
    writers: tuple[Write, ...]  # of weights

    def write(self, folder: Path) -> None:
        for write in self.writers:
            write(folder)
        # To a file object: given a path, torch.save keeps other threads from running, and loses
        # the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(self.state, file)


def check_format(state: Mapping[str, Any], *, folder: Path) -> None:
    """Refuse a trainer state that a later version of Millrace wrote."""
    found = state.get("format", 0)
    if found > STATE_FORMAT:
        raise CheckpointError(
            f"The trainer state in {str(folder)!r} has format {found}, and this version of Millrace"
            f" reads formats up to {STATE_FORMAT}; resume with the version that wrote it."
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's random generators in this process."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def host_copy(tree: Any) -> Any:
    """The same dicts, lists and tuples with host copies of their tensors; tied ones stay tied."""
    return _copied(tree, {})


def _copied(tree: Any, known: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        key = (tree.device, tree.data_ptr(), tree.shape, tree.stride(), tree.dtype)
        if tree.numel() == 0 or key not in known:  # empty tensors share the address 0
            known[key] = tree.detach().to("cpu", copy=True)
        return known[key]
    if isinstance(tree, Mapping):
        return {key: _copied(value, known) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value, known) for value in tree)
    return tree
