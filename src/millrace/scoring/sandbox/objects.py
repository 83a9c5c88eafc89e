"""Proxies through which tests use the functions, classes and objects of the code under test.

Promise: data comes back as plain values. A proxy never compares equal to a plain value, and never
compares less or greater, whatever the object behind it answers.
"""

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import Any

from millrace.scoring.sandbox.candidate import OPERATIONS
from millrace.scoring.sandbox.frames import (
    FrameError,
    Packed,
    pack,
    receive,
    send,
    unpack,
    write_back,
)


class Candidate:
    """The process of the code under test. Used by the runner's single thread."""

    def __init__(
        self, *, requests: int, replies: int, max_bytes: int, on_exit: Callable[[], None]
    ) -> None:
        """`on_exit` is called when the code has ended. It must not return or be catchable."""
        self._requests, self._replies = requests, replies
        self._max_bytes = max_bytes
        self._on_exit = on_exit
        self._errors: dict[tuple[str, str], type[Exception]] = {}

    def names(self) -> dict[str, Any]:
        """Return the names that the code defines. It cannot redefine builtins."""
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
            self._on_exit()
        reply = self._receive()
        if "error" in reply:
            raise self._unpack(reply["error"])(str(reply.get("text", "")))
        if reply.get("after") is not None:  # functions may change their arguments
            changed_args, changed_kwargs = (self._unpack(packed) for packed in reply["after"])
            write_back([list(args), kwargs], [list(changed_args), changed_kwargs])
        return self._unpack(reply.get("value"))

    def _receive(self) -> dict[str, Any]:
        try:
            reply = receive(self._replies, max_bytes=self._max_bytes)
        except FrameError:
            self._on_exit()
            raise
        if not isinstance(reply, dict):
            self._on_exit()
        return reply

    def _unpack(self, packed: Packed) -> Any:
        try:
            return unpack(packed, other=self._represent)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            self._on_exit()  # the code forged the message
            raise

    def _represent(self, packed: list[Any]) -> Any:
        match packed:
            case ["object", int(handle), str(kind)]:
                return Remote(self, handle, kind)
            case ["error", str(name), str(base_name)]:
                return self._error_class(name, base_name)
            case ["module", str(name)] if name.partition(".")[0] in sys.stdlib_module_names:
                # Not the code's own, which it may have changed.
                return importlib.import_module(name)
            case ["module", str()]:
                return None
        raise ValueError(packed)

    def _error_class(self, name: str, base_name: str) -> type[Exception]:
        """Return a builtin exception, or a class derived from it, the same one each time."""
        base = getattr(builtins, base_name, None)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            base = RuntimeError  # for example after sys.exit() in a function
        if issubclass(base, UnicodeError):
            base = UnicodeError  # its subclasses need more than a message
        if name == base.__name__:
            return base
        derived: Any = type(name, (base,), {})
        return self._errors.setdefault((name, base_name), derived)


class Remote:
    """Proxy of an object in the process of the code under test."""

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
    raise TypeError(f"tests can pass data and the code's own objects, not a {type(value).__name__}")


def _define(operation: str) -> None:
    def method(self: Remote, *args: Any) -> Any:
        is_order = operation in ("lt", "le", "gt", "ge")
        if is_order and not all(isinstance(arg, Remote) for arg in args):
            return NotImplemented
        return self._candidate.ask(operation, self, *args)

    setattr(Remote, f"__{operation}__", method)


for _name in OPERATIONS.keys() - {"call", "getattr", "setattr", "eq"}:  # defined above
    _define(_name)
