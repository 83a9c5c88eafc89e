"""Values as strict JSON: numpy scalars become Python's, and what is not finite becomes null."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """`value` as JSON types; raises TypeError for what JSON cannot say."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below) for below in value]
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")
