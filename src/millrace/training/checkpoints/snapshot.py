"""The trainer's state at one version, copied to the host so that training can go on.

Promise: what write() puts into a folder is the state as it was when the snapshot was made, whatever
the trainer has learned since. Made by the trainer's thread; written by any, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATE_FILE = "trainer_state.pt"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainerSnapshot:
    version: int
    state: Mapping[str, Any]  # optimizer and the like; plain values and tensors on the host
    parts: tuple[Callable[[Path], None], ...]  # each writes weights that it holds a copy of

    def write(self, folder: Path) -> None:
        for write in self.parts:
            write(folder)
        # To a file object: given a path, torch.save keeps other threads from running, and loses
        # the reason why a write failed.
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(self.state, file)


def host_copy(tree: Any) -> Any:
    """The same dicts, lists and tuples with copies of their tensors; tied ones stay tied."""
    return _copied(tree, {})


def _copied(tree: Any, known: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        key = (tree.device, tree.data_ptr(), tree.shape, tree.stride(), tree.dtype)
        if tree.numel() == 0 or key not in known:  # empty ones share the address 0
            known[key] = tree.detach().to("cpu", copy=True)
        return known[key]
    if isinstance(tree, Mapping):
        return {key: _copied(value, known) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value, known) for value in tree)
    return tree
