"""Checks of the settings of losses; each failure is one sentence."""

from collections.abc import Sequence
from numbers import Real
from typing import Any


def one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} = {value!r} must be one of {names}")


def at_least(name: str, value: Any, bound: float) -> None:
    """Infinity is accepted, and means no limit."""
    if not (_is_number(value) and value >= bound):
        raise ValueError(f"{name} = {value!r} must be a number, at least {bound:g}")


def above(name: str, value: Any, bound: float) -> None:
    if not (_is_number(value) and value > bound):
        raise ValueError(f"{name} = {value!r} must be a number above {bound:g}")


def within(name: str, value: Any, *, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(f"{name} = {value!r} must be a number from {low:g} to {high:g}")


def is_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} must be true or false")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
