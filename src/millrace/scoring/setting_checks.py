"""Checks of single settings, for the dataclasses that are filled from TOML tables.

Each raises ValueError with the name, the value and what is allowed. core/plugins.py turns that into
a ConfigError with the section.
"""

import math
from typing import Any


def check_text(*, may_be_empty: bool = False, **settings: Any) -> None:
    for name, value in settings.items():
        if not isinstance(value, str) or not (value or may_be_empty):
            what = "a string" if may_be_empty else "a non-empty string"
            raise ValueError(f"{name} = {value!r} must be {what}")


def check_bool(**settings: Any) -> None:
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} must be true or false")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        names = " or ".join(repr(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} = {value!r} must be {names}")


def check_integer(minimum: int, /, **settings: Any) -> None:
    for name, value in settings.items():
        if type(value) is not int or value < minimum:
            raise ValueError(f"{name} = {value!r} must be an integer, at least {minimum}")


def check_number(minimum: float = -math.inf, /, **settings: Any) -> None:
    for name, value in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < minimum:
            limit = f", at least {minimum:g}" if math.isfinite(minimum) else ""
            raise ValueError(f"{name} = {value!r} must be a finite number{limit}")


def check_positive(**settings: Any) -> None:
    for name, value in settings.items():
        check_number(**{name: value})
        if value <= 0:
            raise ValueError(f"{name} = {value!r} must be above 0")


def check_exactly_one(reason: str, /, **settings: Any) -> None:
    """`reason` says why exactly one of the two settings is needed."""
    if sum(value is not None for value in settings.values()) != 1:
        raise ValueError(f"{reason}; set either {' or '.join(settings)}")
