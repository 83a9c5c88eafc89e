"""Settings of losses that check themselves: the type of a field says which values it takes.

A failure is a ValueError of one sentence. Infinity is a number, and means no limit.
"""

import functools
import math
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range of a number; `above` is exclusive."""

    above: float = -math.inf
    at_least: float = -math.inf
    at_most: float = math.inf

    def check(self, name: str, value: Any) -> None:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan
        if not (number > self.above and self.at_least <= number <= self.at_most):
            low = f" above {self.above:g}" if self.above > -math.inf else ""
            low = f", at least {self.at_least:g}" if self.at_least > -math.inf else low
            high = f" and at most {self.at_most:g}" if self.at_most < math.inf else ""
            raise ValueError(f"{name} = {value!r} must be a number{low}{high}")


Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(at_least=0)]
AtLeastOne = Annotated[float, Bounds(at_least=1)]
UnitInterval = Annotated[float, Bounds(at_least=0, at_most=1)]


class CheckedSettings:
    """Base of dataclasses whose fields are Literals, switches or numbers with Bounds."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in _field_types(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                choices = ", ".join(repr(choice) for choice in get_args(kind))
                raise ValueError(f"{name} = {value!r} must be one of {choices}")
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{name} = {value!r} must be true or false")
            if get_origin(kind) is Annotated:
                get_args(kind)[1].check(name, value)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)
