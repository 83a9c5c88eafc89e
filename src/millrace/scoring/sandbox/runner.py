"""The runner: a fresh interpreter that runs one piece of code against its inputs or its tests.

It reads frames from standard input and writes one frame per input or test to standard output. It
forks the code before it reads any test, and closes its own pipes in the fork. Then it confines
itself as well, because tests are code.
"""

import ast
import contextlib
import importlib
import inspect
import os
import sys
import types
import warnings
from typing import Any, NoReturn

from millrace.scoring.sandbox.candidate import MODULE, run_program, serve
from millrace.scoring.sandbox.frames import receive, send
from millrace.scoring.sandbox.lockdown import die_with, has_landlock, hide_memory, isolate, lock
from millrace.scoring.sandbox.objects import Candidate, Remote

MAX_INPUT_BYTES = 2**30
READY = b"1"
# Packages whose import may run a program, here without any confinement.
PROGRAMS = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtledemo"}
SPARE_FD = 100  # above every file descriptor of a runner


def main() -> None:
    job = receive(0, max_bytes=MAX_INPUT_BYTES)
    sys.path = [folder for folder in sys.path if folder != job["root"]]
    job["can_read"] = job["can_read"] and has_landlock()
    job["can_thread"] = isolate() and job["can_thread"]
    die_with(job["parent"])
    hide_memory()
    if not job["can_read"]:
        _preload(job["code"])
    if job["kind"] == "programs":
        for _ in range(job["count"]):
            send(1, _run_program(job, stdin=receive(0, max_bytes=MAX_INPUT_BYTES)))
    else:
        _run_tests(job)


def _run_program(job: dict[str, Any], *, stdin: str) -> dict[str, Any]:
    source = os.memfd_create("stdin")  # a file, so that the runner need not feed a pipe
    os.write(source, stdin.encode())
    os.lseek(source, 0, os.SEEK_SET)
    output, sink = os.pipe()
    fds = [source, sink, os.open(os.devnull, os.O_WRONLY)]
    child = _fork(job, fds=fds)
    if child == 0:
        run_program(job["code"])
    for fd in fds:
        os.close(fd)
    text = _read_to_end(output, max_bytes=job["output_bytes"])
    os.close(output)
    if text is None:
        os.kill(child, 9)
    _, status = os.waitpid(child, 0)
    ok = text is not None and status == 0
    return {"output": text.decode(errors="replace") if ok and text else "", "ok": ok}


def _run_tests(job: dict[str, Any]) -> None:
    requests, to_candidate = os.pipe()
    from_candidate, replies = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    child = _fork(job, fds=[null, null, null, requests, replies])
    if child == 0:
        serve(job["code"], requests=3, replies=4)
    os.close(requests)
    os.close(replies)
    tests = receive(0, max_bytes=MAX_INPUT_BYTES)
    if not job["can_read"]:
        for test in tests:
            _preload(test)
    results = os.dup(1)
    for fd in (0, 1, 2):  # discard the output of tests
        os.dup2(null, fd)
    _lock(job)
    candidate = Candidate(
        requests=to_candidate, replies=from_candidate, max_bytes=job["output_bytes"], on_exit=_exit
    )
    try:
        names = candidate.names()
        solution = types.ModuleType(MODULE)
        # Tests have the names without importing them: `*` must not replace what a test has bound.
        vars(solution).update(names, __all__=[])
        sys.modules[MODULE] = solution  # tests may import it
        for test in tests:
            send(results, {"ok": _passes(test, names)})
    except BaseException:  # noqa: BLE001 - the code may send anything, and use up the memory
        _exit()


def _passes(test: str, names: dict[str, Any]) -> bool:
    """Run the code of a test as a script, and then its functions and classes that are tests."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    own = vars(module)
    try:
        tree = ast.parse(test, "test.py")
        _prepare_unittest(test)
        own |= names | _modules(tree)
        exec(compile(tree, "test.py", "exec"), own)
        for name, value in list(own.items()):
            if isinstance(value, type):
                if value.__module__ == "__main__" and not _class_passes(value):
                    return False
            elif name.startswith("test") and _is_test(value) and not _is_passed(value()):
                return False
    except BaseException:  # noqa: BLE001 - any exception is a failed test
        return False
    return True


def _is_test(value: Any) -> bool:
    """Whether the test defines it, and it can be called without arguments."""
    is_function = isinstance(value, types.FunctionType)
    if isinstance(value, Remote) or (is_function and value.__module__ != "__main__"):
        return False
    try:
        inspect.signature(value, follow_wrapped=False).bind()
    except (TypeError, ValueError):  # it is no callable, needs arguments, or is of a C library
        return False
    return True


def _is_passed(returned: Any) -> bool:
    """Whether a test that returned this has run, and has not returned its failure."""
    not_run = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
    return returned is not False and not isinstance(returned, not_run)


def _class_passes(kind: type[Any]) -> bool:
    """Run the tests of a class of a test and of the classes in it: as unittest does, or as pytest
    does if its name starts with Test."""
    values, prefix = vars(kind).values(), f"{kind.__qualname__}."
    inner = [each for each in values if isinstance(each, type)]
    if not all(_class_passes(each) for each in inner if each.__qualname__.startswith(prefix)):
        return False
    unittest: Any = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        # A test that is skipped or expected to fail shows nothing about the code.
        return result.wasSuccessful() and not (result.skipped or result.expectedFailures)
    if not kind.__name__.startswith("Test"):
        return True
    names = [
        name for name in dir(kind) if name.startswith("test") and callable(getattr(kind, name))
    ]
    return all(_is_passed(getattr(kind(), name)()) for name in names)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _prepare_unittest(test: str) -> None:
    if "unittest" in test:
        import unittest  # here, because few tests use it

        setattr(unittest, "main", _do_nothing)  # noqa: B010 - all test cases run in any case
        # unittest warns of methods that have not run, and passes them.
        warnings.filterwarnings("error", "It is deprecated to return a value")


def _modules(tree: ast.Module) -> dict[str, types.ModuleType]:
    """The library modules that the test uses by name, imported or not. Code that defines a `math`
    of its own must not decide what math.isclose() is."""
    uses: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in sys.stdlib_module_names:
                uses.setdefault(name, set()).add(node.attr)
    found = {name: importlib.import_module(name) for name in uses}
    for name, used in uses.items():
        for part in used - vars(found[name]).keys():  # urllib.parse
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{name}.{part}")
    return {name: module for name, module in found.items() if uses[name] <= vars(module).keys()}


def _exit() -> NoReturn:
    """End the runner after the code has ended: the remaining tests cannot pass."""
    os._exit(0)


def _fork(job: dict[str, Any], *, fds: list[int]) -> int:
    """Fork a confined child in which `fds` are 0, 1, 2 and so on, and no other file is open. Raises
    OSError in the runner if the child cannot be confined. Then no line of the code has run."""
    ready, signal = os.pipe()
    runner = os.getpid()
    child = os.fork()
    if child:
        os.close(signal)
        is_confined = os.read(ready, 1) == READY
        os.close(ready)
        if not is_confined:
            raise OSError("the code could not be confined")
        return child
    try:
        die_with(runner)
        for index, fd in enumerate([*fds, signal]):  # move up first: none is overwritten
            os.dup2(fd, SPARE_FD + index)
        for index in range(len(fds) + 1):
            os.dup2(SPARE_FD + index, index)
        signal = len(fds)
        os.closerange(signal + 1, os.sysconf("SC_OPEN_MAX"))
        _lock(job)
        os.write(signal, READY)
        os.close(signal)
    except BaseException:  # noqa: BLE001 - the runner sees the closed pipe
        os._exit(1)
    return 0


def _lock(job: dict[str, Any]) -> None:
    limits = {"cpu_s": job["cpu_s"], "memory_bytes": job["memory_bytes"]}
    lock(**limits, can_read=job["can_read"], can_thread=job["can_thread"])


def _read_to_end(fd: int, *, max_bytes: int) -> bytes | None:
    """Return all bytes, or None if there are more than `max_bytes`."""
    parts: list[bytes] = []
    left = max_bytes
    while part := os.read(fd, 2**16):
        left -= len(part)
        if left < 0:
            return None
        parts.append(part)
    return b"".join(parts)


def _preload(code: str) -> None:
    """Import the standard library modules that the code names, because it cannot open files."""
    importlib.import_module("_strptime")  # datetime imports it lazily
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # running the code raises the same error
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            package, *parts = name.split(".")
            if package not in sys.stdlib_module_names - PROGRAMS or "__main__" in (package, *parts):
                continue
            module, _, attribute = name.rpartition(".")
            with contextlib.suppress(Exception):  # the code gets an error, too
                # hasattr() triggers the lazy import of an attribute.
                if not (module and hasattr(sys.modules.get(module), attribute)):
                    importlib.import_module(name)
