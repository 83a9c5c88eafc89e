"""Keyword arguments of `mr.train` for editors and type checkers, which read keywords.pyi instead of
this file. `python tools/write_keywords.py` writes it from the settings models."""

from typing import TypedDict


class TrainArguments(TypedDict, total=False):
    """The arguments of mr.train."""
