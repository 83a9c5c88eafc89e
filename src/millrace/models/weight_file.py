"""Weights of one version in a file, for a process that takes the place of another.

Promise: the file is there as a whole or not at all, also after a crash of the machine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from millrace.core.files import sync

if TYPE_CHECKING:
    from torch import Tensor


def write_weights(path: Path, tensors: "Mapping[str, Tensor]", *, version: int) -> None:
    """In the place of what was there before."""
    from safetensors.torch import save_file  # only here: it imports torch

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, partial, metadata={"version": str(version)})
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def read_weights(path: Path) -> "tuple[int, dict[str, Tensor]]":
    """Their version, and the tensors."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return int(file.metadata()["version"]), tensors


def version_in(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["version"])
