"""Python values as JSON and back, by the types that tests compare.

Promise: unpack() builds plain builtin values only, so nothing that comes out of it has an opinion
of its own about what it equals. Subclasses (Counter, namedtuple) travel as what they extend; what
is no data is left to the caller.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Packed = Any  # None, bool, str, float, or a list [type, ...]
_COLLECTIONS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes, bytearray)
}


def pack(value: Any, *, other: Callable[[Any], Packed]) -> Packed:
    """`other` packs what is no data, or raises."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return ["int", int.__format__(value, "x")]  # no limit to its digits, as decimal has
        case float():
            return float.__float__(value)
        case complex():
            return ["complex", value.real, value.imag]
        case Decimal() | Fraction():
            kind = "Decimal" if isinstance(value, Decimal) else "Fraction"
            return [kind, str(value)]
        case dict():
            pairs = [
                [pack(key, other=other), pack(item, other=other)] for key, item in value.items()
            ]
            return ["dict", pairs]
        case bytes() | bytearray():
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    for name in ("list", "tuple", "set", "frozenset"):
        if isinstance(value, _COLLECTIONS[name]):
            return [name, [pack(item, other=other) for item in value]]
    return other(value)


def unpack(packed: Packed, *, other: Callable[[list[Any]], Any]) -> Any:
    """`other` makes something of a list that packs no data."""
    if not isinstance(packed, list):
        return packed
    match packed:
        case ["int", str(text)]:
            return int(text, 16)
        case ["complex", float(real), float(imag)]:
            return complex(real, imag)
        case ["Decimal", str(text)]:
            return Decimal(text)
        case ["Fraction", str(text)]:
            return Fraction(text)
        case ["dict", list(pairs)]:
            return {unpack(k, other=other): unpack(item, other=other) for k, item in pairs}
        case ["bytes" | "bytearray" as name, str(text)]:
            return _COLLECTIONS[name].fromhex(text)
        case ["list" | "tuple" | "set" | "frozenset" as name, list(items)]:
            return _COLLECTIONS[name](unpack(item, other=other) for item in items)
        case _:
            return other(packed)


def write_back(original: Any, changed: Any) -> Any:
    """Make containers in `original` equal to `changed`, in place where they can be; returns what
    stands for `changed` then."""
    match original, changed:
        case (list(), list()):
            merged = [write_back(a, b) for a, b in zip(original, changed, strict=False)]
            original[:] = merged + changed[len(merged) :]
        case (dict(), dict()):
            merged = {
                key: write_back(original[key], item) if key in original else item
                for key, item in changed.items()
            }
            original.clear()
            original.update(merged)
        case (set(), set()):
            original.clear()
            original.update(changed)
        case _:
            return changed
    return original
