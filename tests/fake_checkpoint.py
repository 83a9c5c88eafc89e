"""A checkpoint directory that is whole, but holds no weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tiny_model import ALPHABET

from millrace.training.checkpoints.directory import write_checkpoint


def write_fake_checkpoint(
    directory: Path, *, run_state: dict[str, Any], num_layers: int = 2
) -> None:
    """As of the tiny model, unless it has another number of layers."""
    write = partial(_write, num_layers=num_layers)
    write_checkpoint(directory, write=write, run_state=run_state, needed_bytes=0)


def _write(folder: Path, *, num_layers: int) -> None:
    (folder / "merged").mkdir()
    (folder / "merged" / "model.safetensors").write_bytes(b"12345")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 2 + len(ALPHABET),
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape}))
    (folder / "trainer_state.pt").write_text("{}")
