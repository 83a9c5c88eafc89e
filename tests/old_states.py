"""Trainer states in checkpoints, changed into those of other versions."""

from pathlib import Path

import torch

from millrace.training.checkpoints.snapshot import STATE_FILE


def change_state(directory: Path, change) -> None:
    state = torch.load(directory / STATE_FILE, weights_only=True)
    change(state)
    torch.save(state, directory / STATE_FILE)


def number_parameters(state) -> None:
    """As states before format numbers name them."""
    state.pop("format", None)
    owners = [state, state["critic"]] if "critic" in state else [state]
    for optimizer in (owner["optimizer"] for owner in owners):
        groups = optimizer["param_groups"]
        numbers = {name: i for i, name in enumerate(n for g in groups for n in g["params"])}
        for group in groups:
            group["params"] = [numbers[name] for name in group["params"]]
        optimizer["state"] = {numbers[name]: values for name, values in optimizer["state"].items()}
