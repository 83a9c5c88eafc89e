"""Proxies through which tests use the functions, classes and objects of the code under test.

Promise: data comes back as plain values, and no object of the code can pass for data. A proxy never
equals a plain value and never compares less or greater. The name that the test uses decides what
else a proxy can do, because the test's author chose it and the code did not:

- Remote, the result of a call or an attribute. It has attributes and can be called, iterated once,
  shown as text, and combined with other proxies. It has no length, items, truth value or arithmetic
  with plain data, and none of the methods of numbers and texts: a test that expects data fails.
- RemoteName, what a name of the code stands for. It has all attributes.
- RemoteClass, for a name that starts with a capital letter, and RemoteInstance, the result of
  calling it. The test uses a class of the code, so its length, items and operators are those of the
  code. Arithmetic with plain data must not result in plain data.
"""

import builtins
from collections.abc import Callable
from typing import Any, NoReturn

from millrace.scoring.sandbox.candidate import ARITHMETIC, ORDER
from millrace.scoring.sandbox.frames import (
    FrameError,
    Packed,
    pack,
    receive,
    send,
    unpack,
    write_back,
)

# Methods of values that cannot change. Tests call them on results that they expect to be data.
DATA_METHODS = {
    name for kind in (str, bytes, int, float, complex, tuple, frozenset) for name in dir(kind)
}


# Library functions evaluate them: typing.get_type_hints() would run the code's text in the runner.
_EVALUATED = ("__annotations__", "__text_signature__")
# Builtins of the module site, which the runner does not import.
_SITE_NAMES = ("copyright", "credits", "exit", "help", "license", "quit")


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
            name: _renewed(self._unpack(packed), RemoteClass if _is_class(name) else RemoteName)
            for name, packed in found.items()
            if not (name.startswith("__") or name in _SITE_NAMES or hasattr(builtins, name))
        }

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
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
            error = self._unpack(reply["error"])
            ends_loop = issubclass(error, StopIteration) and operation != "next"
            if ends_loop or issubclass(error, StopAsyncIteration):
                error = RuntimeError  # as in a generator: it would end a loop of the test
            raise error(str(reply.get("text", "")))
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
            case ["module"]:
                return None  # the runner imports the modules that a test uses
        raise ValueError(packed)

    def _error_class(self, name: str, base_name: str) -> type[Exception]:
        """Return a class derived from a builtin exception, the same one each time. It is never the
        builtin itself: `Refused = AssertionError` in the code must not catch errors of the test."""
        base = getattr(builtins, base_name, None)
        if not (isinstance(base, type) and issubclass(base, Exception)):
            base = RuntimeError  # for example after sys.exit() in a function
        if issubclass(base, UnicodeError):
            base = UnicodeError  # its subclasses need more than a message
        derived: Any = type(name, (base,), {})
        return self._errors.setdefault((name, base_name), derived)


class Remote:
    """Proxy of an object in the process of the code under test."""

    def __init__(self, candidate: Candidate, handle: int, kind: str) -> None:
        vars(self).update(_candidate=candidate, _handle=handle, _kind=kind)
        vars(self).update(_iterator=None, _is_exhausted=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"a {self._kind} of the code under test has no {name} here")
        value = self._ask("getattr", name)
        if isinstance(value, Remote) and name in DATA_METHODS:
            raise AttributeError(f"the code under test returned a {self._kind}, which is not data")
        return _renewed(value, RemoteClass) if _is_class(name) else value

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise TypeError("a class of a test cannot extend one of the code under test")

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("eq", other) is True

    def __iter__(self) -> Any:
        """Iterate once, so that the code cannot answer differently the second time."""
        if self._iterator is None:
            iterator = self._ask("iter")
            is_own = isinstance(iterator, Remote) and iterator._handle == self._handle
            vars(self)["_iterator"] = self if is_own else iterator
        elif self._iterator is not self or self._is_exhausted:
            raise TypeError("a result of the code under test can be iterated once; use list()")
        return self._iterator

    def __next__(self) -> Any:
        if self._is_exhausted:
            raise StopIteration
        try:
            return self._ask("next")
        except StopIteration:
            vars(self)["_is_exhausted"] = True
            raise

    def _ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._candidate.ask(operation, self, *args, **kwargs)

    def _compare(self, operation: str, other: Any) -> Any:
        return self._ask(operation, other) is True if isinstance(other, Remote) else NotImplemented

    def _combine(self, operation: str, other: Any) -> Any:
        """The result of an operator, here with another proxy only."""
        return self._ask(operation, other) if isinstance(other, Remote) else NotImplemented


class RemoteName(Remote):
    """Proxy of a name of the code: a function or an object."""

    def __getattr__(self, name: str) -> Any:
        if name in _EVALUATED:
            raise AttributeError(f"{name} of the code under test cannot be read")
        value = self._ask("getattr", name)
        return _renewed(value, RemoteClass) if _is_class(name) else value


class RemoteInstance(RemoteName):
    """Proxy of an object that the test created from a class of the code."""

    def __neg__(self) -> Any:
        return _renewed(self._ask("neg"), RemoteInstance)

    def _combine(self, operation: str, other: Any) -> Any:
        result = self._ask(operation, other)
        if isinstance(other, RemoteInstance):
            return _renewed(result, RemoteInstance)
        if not isinstance(other, Remote) and not isinstance(result, Remote):
            raise TypeError(f"a {self._kind} of the code under test cannot turn data into data")
        return result


class RemoteClass(RemoteInstance):
    """Proxy of a name that starts with a capital letter."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _renewed(self._ask("call", *args, **kwargs), RemoteInstance)


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _renewed(value: Any, kind: type[Remote]) -> Any:
    """The same object behind a proxy of another kind; data is unchanged."""
    if type(value) is not Remote:
        return value
    return kind(value._candidate, value._handle, value._kind)


def _refer(value: Any) -> Packed:
    if isinstance(value, Remote):
        return ["object", vars(value)["_handle"], vars(value)["_kind"]]
    raise TypeError(f"tests can pass data and the code's own objects, not a {type(value).__name__}")


def _define_operator(operation: str) -> None:
    def method(self: Remote, other: Any) -> Any:
        ask = self._compare if operation in ORDER else self._combine
        return ask(operation, other)

    setattr(Remote, f"__{operation}__", method)


def _define_method(kind: type[Remote], operation: str) -> None:
    def method(self: Remote, *args: Any) -> Any:
        return self._ask(operation, *args)

    setattr(kind, f"__{operation}__", method)


for _name in (*ORDER, *ARITHMETIC):
    _define_operator(_name)
for _name in ("hash", "str", "repr"):
    _define_method(Remote, _name)
for _name in ("bool", "len", "iter", "getitem", "setitem", "delitem"):
    _define_method(RemoteInstance, _name)
