"""The process of the code under test: executes the operations that the tests request.

Promise: no other process trusts anything here. Whatever the code does to this module, to builtins
or to its pipes changes only its own answers.
"""

import builtins
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from millrace.scoring.sandbox.frames import Packed, pack, receive, send, unpack

MODULE = "solution"
MAX_REQUEST_BYTES = 2**28

ORDER = ("lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    **{
        name: getattr(operator, name)
        for name in ("getitem", "setitem", "delitem", "eq", "neg", *ORDER, *ARITHMETIC)
    },
}


class Handles:
    """The objects that the tests hold references to, by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id(), unique while objects are kept

    def pack(self, value: Any) -> Packed:
        return pack(value, other=self._refer)

    def unpack(self, packed: Packed) -> Any:
        return unpack(packed, other=lambda reference: self._objects[reference[1]])

    def _refer(self, thing: Any) -> Packed:
        if isinstance(thing, types.ModuleType):
            return ["module"]
        if isinstance(thing, type) and issubclass(thing, BaseException):
            return _pack_class(thing)
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._objects)
            self._objects.append(thing)
        return ["object", self._numbers[id(thing)], type(thing).__name__]


def run_program(code: str) -> None:
    """Run the code as a script; never returns."""
    sys.argv = [f"{MODULE}.py"]
    status = 0
    try:
        _execute(code, name="__main__")
        sys.stdout.flush()
    except SystemExit as leaving:
        sys.stdout.flush()
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - any exception means that the program failed
        status = 1
    os._exit(status & 0xFF)


def serve(code: str, *, requests: int, replies: int) -> None:
    """Load the code as a module and answer requests over two pipes; never returns."""
    handles = Handles()
    try:
        names = vars(_execute(code, name=MODULE))
        shown = {
            name: handles.pack(value)
            for name, value in names.items()
            if not (name.startswith("__") or hasattr(builtins, name))
        }
        send(replies, {"names": shown})
        while True:
            request = receive(requests, max_bytes=MAX_REQUEST_BYTES)
            send(replies, _answer(request, handles))
    except BaseException:  # noqa: BLE001 - loading or answering failed; the runner sees the exit
        os._exit(1)


def _execute(code: str, *, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"{MODULE}.py", "exec"), vars(module))
    return module


def _answer(request: dict[str, Any], handles: Handles) -> dict[str, Any]:
    arguments = handles.unpack(request["args"])
    keywords = handles.unpack(request["kwargs"])
    try:
        value = OPERATIONS[request["operation"]](*arguments, **keywords)
        after = [handles.pack(arguments), handles.pack(keywords)]
        is_changed = after != [request["args"], request["kwargs"]]
        return {"value": handles.pack(value), "after": after if is_changed else None}
    except BaseException as error:  # noqa: BLE001 - the tests may expect it
        return {"error": _pack_class(type(error)), "text": str(error)}


def _pack_class(error: type[BaseException]) -> Packed:
    """Pack an exception class as its name and the name of the builtin that it extends."""
    known = next(base for base in error.__mro__ if getattr(builtins, base.__name__, None) is base)
    return ["error", error.__name__, known.__name__]
