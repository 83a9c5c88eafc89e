"""What tests hold instead of the code under test: its functions, classes and objects, from afar.

Promise: data comes back as plain values. An object of the code's own is asked only about itself:
it equals no plain value and is neither more nor less than one, whatever it says.
"""

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

from millrace.scoring.sandbox.frames import FrameError, receive, send
from millrace.scoring.sandbox.values import Packed, pack, unpack, write_back


class Candidate:
    """The other process, and the names it defines. Used by the judge's one thread."""

    def __init__(
        self, *, requests: int, replies: int, max_bytes: int, on_end: Callable[[], None]
    ) -> None:
        """`on_end` must not return: no test may go on, and none may catch it, once the code is
        gone."""
        self._requests, self._replies = requests, replies
        self._max_bytes = max_bytes
        self._on_end = on_end
        self._errors: dict[tuple[str, str], type[Exception]] = {}

    def names(self) -> dict[str, Any]:
        """Everything the code defines, once it has run; builtins keep their meaning."""
        found = self._receive().get("names", {})
        return {
            name: self._unpack(packed)
            for name, packed in found.items()
            if not (name.startswith("__") or hasattr(builtins, name))
        }

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        request = {
            "operation": operation,
            "args": pack(args, other=_refer),
            "kwargs": pack(kwargs, other=_refer),
        }
        try:
            send(self._requests, request)
        except FrameError:
            self._on_end()
        reply = self._receive()
        if "error" in reply:
            raise self._unpack(reply["error"])(str(reply.get("text", "")))
        if reply.get("after") is not None:  # functions may work in place
            changed_args, changed_kwargs = (self._unpack(packed) for packed in reply["after"])
            write_back([list(args), kwargs], [list(changed_args), changed_kwargs])
        return self._unpack(reply.get("value"))

    def _receive(self) -> dict[str, Any]:
        try:
            reply = receive(self._replies, max_bytes=self._max_bytes)
        except FrameError:
            self._on_end()
            raise
        if not isinstance(reply, dict):
            self._on_end()
        return reply

    def _unpack(self, packed: Packed) -> Any:
        try:
            return unpack(packed, other=self._represent)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            self._on_end()  # it made that up
            raise

    def _represent(self, packed: list[Any]) -> Any:
        match packed:
            case ["object", int(handle), str(kind)]:
                return Remote(self, handle, kind)
            case ["error", str(), str()]:
                return self._error_class(packed)
            case ["module", str(name)] if name.partition(".")[0] in sys.stdlib_module_names:
                return importlib.import_module(name)  # our own: the code may have changed its own
            case ["module", str()]:
                return None
        raise ValueError(packed)

    def _error_class(self, packed: Packed) -> type[Exception]:
        """A builtin exception, or one that the code derived from it: the same class each time."""
        match packed:
            case ["error", str(name), str(base_name)]:
                base = getattr(builtins, base_name, None)
            case _:
                raise ValueError(packed)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            base = RuntimeError  # sys.exit() in a function, say
        if issubclass(base, UnicodeError):
            base = UnicodeError  # those below it cannot be made of a text alone
        if name == base.__name__:
            return base
        derived: Any = type(name, (base,), {})
        return self._errors.setdefault((name, base_name), derived)


class Remote:
    """An object in the other process."""

    def __init__(self, candidate: Candidate, handle: int, kind: str) -> None:
        vars(self).update(_candidate=candidate, _handle=handle, _kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._candidate.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._candidate.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.ask("call", self, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._candidate.ask("eq", self, other) is True


def _refer(value: Any) -> Packed:
    if isinstance(value, Remote):
        return ["object", vars(value)["_handle"], vars(value)["_kind"]]
    raise TypeError(
        f"tests can pass data and the code's own objects to it, not a {type(value).__name__}"
    )


def _define(name: str, operation: str, *, among_remotes: bool = False) -> None:
    def method(self: Remote, *args: Any) -> Any:
        if among_remotes and not all(isinstance(arg, Remote) for arg in args):
            return NotImplemented
        return self._candidate.ask(operation, self, *args)

    setattr(Remote, name, method)


for _name in ("iter", "next", "len", "str", "repr", "bool", "hash"):
    _define(f"__{_name}__", _name)
for _name in ("getitem", "setitem", "delitem", "contains"):
    _define(f"__{_name}__", _name)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "matmul"):
    _define(f"__{_name}__", _name)
for _name in ("lt", "le", "gt", "ge"):
    _define(f"__{_name}__", _name, among_remotes=True)
