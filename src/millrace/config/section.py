"""The base class of every settings table, and the types of its values. Torch-free."""

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import InitErrorDetails

# Strict: true is not a number, and "8" is not 8.
Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]

NonEmptyStr = Annotated[str, Field(min_length=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


def _or_auto(kind: Any) -> PlainValidator:
    """Validates a value of this kind or "auto"; a union would report both of its halves."""
    adapter = TypeAdapter[Any](kind)

    def validate(value: Any) -> Any:
        if value == "auto":
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{error.errors()[0]['msg']}, or 'auto'") from None

    return PlainValidator(validate)


PositiveFloatOrAuto = Annotated[float | Literal["auto"], _or_auto(PositiveFloat)]
PositiveIntOrAuto = Annotated[int | Literal["auto"], _or_auto(PositiveInt)]
NonNegativeIntOrAuto = Annotated[int | Literal["auto"], _or_auto(NonNegativeInt)]


UNBOUNDED = sys.maxsize  # groups, of a buffer without a bound
_BATCHES = re.compile(r"([1-9]\d{0,5}) batch(es)?")


def _count_groups(value: Any) -> Any:
    """Validates a number of groups, "unbounded", or "2 batches"."""
    if isinstance(value, str) and (value == "unbounded" or _BATCHES.fullmatch(value)):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError("a number of groups above 0, such as 64, '2 batches' or 'unbounded' is needed")


GroupCount = Annotated[int | str, PlainValidator(_count_groups)]
"""A number of groups; "2 batches" is twice trainer.groups_per_step."""


def num_groups(count: GroupCount, *, groups_per_step: int) -> int:
    if isinstance(count, int):
        return count
    batches = _BATCHES.fullmatch(count)
    return UNBOUNDED if batches is None else int(batches[1]) * groups_per_step


TypeAlone = BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)
"""A name alone stands for a table with that type."""

OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""A text alone stands for a tuple of one."""

Devices = Annotated[tuple[Device, ...], OneOrMore, Field(min_length=1)]
"""One device, or a list of devices."""

Plugin = Annotated[dict[str, Any], TypeAlone]
"""A table of a built-in or of the user's own class: its `type` and its keys, or the name alone."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # inf is a valid value; a worker must not read it as null
    )


def forbid(title: str, unknown: dict[str, Any]) -> None:
    """Raise for these keys as extra="forbid" does."""
    errors: list[InitErrorDetails] = [
        {"type": "extra_forbidden", "loc": (key,), "input": value} for key, value in unknown.items()
    ]
    raise ValidationError.from_exception_data(title, errors)
