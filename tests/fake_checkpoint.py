"""A checkpoint directory that is whole, but holds no model."""

from pathlib import Path
from typing import Any

from millrace.training.checkpoints.directory import write_checkpoint


def write_fake_checkpoint(directory: Path, *, run_state: dict[str, Any]) -> None:
    write_checkpoint(directory, write=_write, run_state=run_state, needed_bytes=0)


def _write(folder: Path) -> None:
    (folder / "merged").mkdir()
    (folder / "merged" / "model.safetensors").write_bytes(b"12345")
    for name in ("config.json", "trainer_state.pt"):
        (folder / name).write_text("{}")
