"""The judge: a fresh interpreter that runs one piece of code against its inputs or its tests.

It reads frames from standard input, and writes one frame per input or test to standard output. The
code is forked off before the judge has read any test, with none of the judge's pipes; then the
judge locks itself in, too, as tests are code.
"""

import os
import sys
import types
from typing import Any, NoReturn

from millrace.scoring.sandbox.candidate import MODULE, run_program, serve
from millrace.scoring.sandbox.frames import receive, send
from millrace.scoring.sandbox.lockdown import die_with, has_landlock, hide_memory, lock
from millrace.scoring.sandbox.objects import Candidate

MAX_INPUT_BYTES = 2**30
READY = b"1"
AWAY = 100  # above every file descriptor of a judge


def main() -> None:
    order = receive(0, max_bytes=MAX_INPUT_BYTES)
    die_with(order["parent"])
    hide_memory()
    sys.path = [folder for folder in sys.path if folder != order["root"]]
    if order["can_read"] is False or not has_landlock():
        _preload(order["code"])
    if order["kind"] == "programs":
        for _ in range(order["count"]):
            send(1, _run_program(order, stdin=receive(0, max_bytes=MAX_INPUT_BYTES)))
    else:
        _run_tests(order)


def _run_program(order: dict[str, Any], *, stdin: str) -> dict[str, Any]:
    """What the code prints when it runs as a script."""
    source = os.memfd_create("stdin")  # read at leisure: nobody has to feed it
    os.write(source, stdin.encode())
    os.lseek(source, 0, os.SEEK_SET)
    output, sink = os.pipe()
    child = _fork(order, fds=[source, sink, os.open(os.devnull, os.O_WRONLY)])
    if child == 0:
        run_program(order["code"])
    os.close(source)
    os.close(sink)
    text = _read_to_end(output, max_bytes=order["output_bytes"])
    os.close(output)
    if text is None:
        os.kill(child, 9)
    _, status = os.waitpid(child, 0)
    is_fine = text is not None and status == 0
    return {"output": text.decode(errors="replace") if is_fine and text else "", "ok": is_fine}


def _run_tests(order: dict[str, Any]) -> None:
    requests, to_candidate = os.pipe()
    from_candidate, replies = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    child = _fork(order, fds=[nothing, nothing, nothing, requests, replies])
    if child == 0:
        serve(order["code"], requests=3, replies=4)
    os.close(requests)
    os.close(replies)
    tests = receive(0, max_bytes=MAX_INPUT_BYTES)
    results = os.dup(1)
    for fd in (0, 1, 2):  # what tests print is nobody's
        os.dup2(nothing, fd)
    lock(cpu_s=order["cpu_s"], memory_bytes=order["memory_bytes"], can_read=order["can_read"])
    candidate = Candidate(
        requests=to_candidate,
        replies=from_candidate,
        max_bytes=order["output_bytes"],
        on_end=_give_up,
    )
    try:
        names = candidate.names()
    except Exception:  # noqa: BLE001 - the code can make up anything
        _give_up()
    solution = types.ModuleType(MODULE)
    vars(solution).update(names)
    sys.modules[MODULE] = solution  # tests may import it
    for test in tests:
        send(results, {"ok": _passes(test, dict(names))})


def _passes(test: str, names: dict[str, Any]) -> bool:
    """Run a test's text, and the functions named test_* that it defines."""
    names["__name__"] = "test"
    try:
        exec(compile(test, "test.py", "exec"), names)
        for name, value in list(names.items()):
            if name.startswith("test_") and isinstance(value, types.FunctionType):
                value()
    except BaseException:  # noqa: BLE001 - any way of not getting to the end is a failure
        return False
    return True


def _give_up() -> NoReturn:
    """The code has ended, so no result that is still open can be a pass."""
    os._exit(0)


def _fork(order: dict[str, Any], *, fds: list[int]) -> int:
    """In the child, which returns locked, `fds` are 0, 1, 2 and so on, and nothing else is open.

    Raises OSError in the judge if the child could not be locked: then no line of the code has run.
    """
    ready, signal = os.pipe()
    judge = os.getpid()
    child = os.fork()
    if child:
        os.close(signal)
        is_locked = os.read(ready, 1) == READY
        os.close(ready)
        if not is_locked:
            raise OSError("the code could not be locked in")
        return child
    try:
        die_with(judge)
        for index, fd in enumerate([*fds, signal]):  # away first, so that none is overwritten
            os.dup2(fd, AWAY + index)
        for index in range(len(fds) + 1):
            os.dup2(AWAY + index, index)
        signal = len(fds)
        os.closerange(signal + 1, os.sysconf("SC_OPEN_MAX"))
        lock(cpu_s=order["cpu_s"], memory_bytes=order["memory_bytes"], can_read=order["can_read"])
        os.write(signal, READY)
        os.close(signal)
    except BaseException:  # noqa: BLE001 - the judge is told by the end of the pipe
        os._exit(1)
    return 0


def _read_to_end(fd: int, *, max_bytes: int) -> bytes | None:
    """None if there is more than that."""
    parts: list[bytes] = []
    left = max_bytes
    while part := os.read(fd, 2**16):
        left -= len(part)
        if left < 0:
            return None
        parts.append(part)
    return b"".join(parts)


def _preload(code: str) -> None:
    """Import the modules of the standard library that the code names: it cannot open files."""
    import ast
    import importlib

    importlib.import_module("_strptime")  # datetime loads it only when it is used
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the code will find out itself
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] in sys.stdlib_module_names - {"antigravity", "this"}:
                _import(name)


def _import(name: str) -> None:
    """A module, or what a module loads when it is asked for it."""
    import importlib

    module, _, attribute = name.rpartition(".")
    try:
        if not (module and hasattr(sys.modules.get(module), attribute)):
            importlib.import_module(name)
    except ImportError:
        return  # no such module: the code will get the same error, if it was meant to be one
