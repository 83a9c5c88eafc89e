"""Turns the bytes of a request body into a checked model of pydantic.

Promise: reading a body takes time in proportion to its size, whatever it contains. A list is
checked up to its first error, and very many parts or errors are refused without naming them.
"""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from millrace.serving.api.errors import ApiError

MAX_ERRORS = 100  # that are looked at
# Parts of a body. The characters { [ and , in its texts count, too.
MAX_OBJECTS = 2**16
MAX_VALUES = 2**19
MAX_STRINGS = 2**16  # names of fields included
UNKNOWN_FIELD, WRONG_TOKEN = "unknown_field", "wrong_token"  # types of errors of pydantic
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    # Strict, as /openapi.json says: "yes" is not a boolean and "1" is not a number.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_first_unknown_field(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": name})
        return value


def read_body(kind: type[B], data: bytes) -> B:
    """Parse and check a request body; raises ApiError."""
    num_objects, num_values = data.count(b"{") + data.count(b"["), data.count(b",")
    if num_objects > MAX_OBJECTS or num_values > MAX_VALUES:
        raise ApiError(
            f"The body has {num_objects} objects and lists and {num_values} values, but at most"
            f" {MAX_OBJECTS} and {MAX_VALUES} are read; send several smaller ones.",
            status=413,
        )
    if (num_quotes := data.count(b'"')) > 2 * MAX_STRINGS:
        num_strings = (num_quotes - data.count(b'\\"')) // 2
        if num_strings > MAX_STRINGS:
            raise ApiError(
                f"The body has {num_strings} strings, but at most {MAX_STRINGS} are read; send"
                " several smaller ones.",
                status=413,
            )
    try:
        table = msgspec.json.decode(data)  # several times as fast as the standard library
    except (ValueError, RecursionError) as error:  # also invalid UTF-8 and lone surrogates
        raise ApiError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(table, dict):
        raise ApiError(f"The body is JSON, but not an object: {_brief(table)}.")
    return validate_body(kind, table)


def validate_body(kind: type[B], table: dict[str, Any]) -> B:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise _refusal(error) from None


def _brief(value: Any) -> str:
    """The beginning of a value as JSON, without a look at the rest."""
    parts = json.JSONEncoder().iterencode(value[:80] if isinstance(value, str) else value)
    return "".join(islice(parts, 80))[:80]


def _refusal(error: ValidationError) -> ApiError:
    if (count := error.error_count()) > MAX_ERRORS:
        return ApiError(f"The body has {count} unknown fields or wrong values; correct them.")
    # Each branch of a union reports an error. The deepest one is the most specific, preferably one
    # that is not about the type. After many tokens, it can only be about a token.
    first = max(
        error.errors(),
        key=lambda detail: (
            detail["type"] == WRONG_TOKEN,
            len(_place(detail)),
            not detail["type"].endswith("_type"),
        ),
    )
    where = ".".join(str(part) for part in _place(first) if not _is_branch(part))
    if first["type"] == UNKNOWN_FIELD:
        return ApiError(f"Unknown field {where!r}; remove it.", param=where, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(f"Field {where!r} is missing.", param=where)
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not where:
        return ApiError(f"{message[0].upper()}{message[1:]}.")
    if (only := _supported_value(first)) is not None:
        message = f"only {only} is supported here"
    return ApiError(f"Field {where!r} = {_brief(first['input'])}: {message}.", param=where)


def _place(detail: Mapping[str, Any]) -> tuple[int | str, ...]:
    unknown = (detail["ctx"]["name"],) if detail["type"] == UNKNOWN_FIELD else ()
    return (*detail["loc"], *unknown)


def _supported_value(detail: Mapping[str, Any]) -> str | None:
    """Return the only supported value of a field, as JSON; None if there are several."""
    match detail:
        case {"type": "literal_error", "ctx": {"expected": str(expected)}}:
            return expected.replace("False", "false")
        case {"type": "none_required"}:
            return "null"
        case {"type": "too_long", "ctx": {"max_length": 0}}:
            return "{}"
        case _:
            return None


def _is_branch(part: int | str) -> bool:
    """True for the name of a union branch, which pydantic adds to the location."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or "[" in part)
