"""Finds test code that would pass without a check having run, and so reward every completion.

Promise: test code is parsed and never executed. The answer depends on the test code alone, so no
completion can make its task unusable.
"""

import ast
from collections.abc import Iterable
from functools import lru_cache

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@lru_cache(maxsize=16)  # the completions of a group have the same tests
def why_unusable(code: str) -> str | None:
    """Why the test code cannot be used, or None if it can."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be parsed: {error}"
    body = tree.body
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
            return f"line {node.lineno} compares without 'assert'"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
            return f"line {node.lineno} asserts a tuple, which is always true"
    defined = [node for node in body if isinstance(node, Definition)]
    used = _names(node for node in body if node not in defined)
    if (found := _lost_test(defined, used, can_await=False)) is not None:
        return found
    reached: list[Definition] = []
    while new := [n for n in defined if n not in reached and (n.name in used or _is_run(n))]:
        reached += new
        used |= _names(new)
    for node in defined:
        if node not in reached and _is_meant_to_run(node):
            return f"{_place(node)} is never called"
    return None if reached or not all(map(_is_inert, body)) else "it checks nothing"


def _lost_test(nodes: list[Definition], used: set[str], *, can_await: bool) -> str | None:
    """Why a test of a module or a class is lost: it is never awaited, or replaced by another."""
    names: set[str] = set()
    for node in filter(_is_named_test, nodes):
        if isinstance(node, ast.AsyncFunctionDef) and not can_await and node.name not in used:
            return f"{_place(node)} is asynchronous and never awaited"
        if node.name in names and node.name not in used:
            return f"{_place(node)} replaces another test of this name"
        names.add(node.name)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            found = _lost_test(_inner(node), used, can_await=bool(_bases(node) - {"TestCase"}))
            if found is not None:
                return found
    return None


def _is_run(node: Definition) -> bool:
    """Whether the sandbox may run it: a test without arguments, or a class with tests."""
    if node.decorator_list:
        return True
    if not isinstance(node, ast.ClassDef):
        given = node.args
        num_arguments = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
        defaults = [each for each in (*given.defaults, *given.kw_defaults) if each is not None]
        return _is_named_test(node) and num_arguments == len(defaults)
    is_case = _is_named_test(node) or bool(_bases(node))
    is_extended = bool(_bases(node) - {"TestCase"})
    nested = [each for each in _inner(node) if isinstance(each, ast.ClassDef)]
    return is_extended or (is_case and _has_tests(node)) or any(map(_is_run, nested))


def _is_meant_to_run(node: Definition) -> bool:
    if isinstance(node, ast.ClassDef) and ("TestCase" in _bases(node) or _has_tests(node)):
        return True
    return _is_named_test(node) or node.name.startswith("check")  # as in HumanEval


def _has_tests(node: ast.ClassDef) -> bool:
    assigned = (each for each in node.body if isinstance(each, ast.Assign))
    names = [ast.unparse(target) for each in assigned for target in each.targets]
    names += [each.name for each in _inner(node)]
    return any(name.startswith(("test", "runTest")) for name in names)


def _is_named_test(node: Definition) -> bool:
    return node.name.startswith("Test" if isinstance(node, ast.ClassDef) else ("test", "runTest"))


def _is_inert(node: ast.stmt) -> bool:
    """Whether the statement can hardly fail: a definition, an import, or a value without a call."""
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(each, ast.Call | ast.Subscript) for each in ast.walk(node))
    return isinstance(node, Definition | ast.Import | ast.ImportFrom | ast.Pass)


def _inner(node: ast.ClassDef) -> list[Definition]:
    return [each for each in node.body if isinstance(each, Definition)]


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases} - {"object"}


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that the nodes read, also as attributes or in texts (globals()["check"])."""
    found: set[str] = set()
    for each in (each for node in nodes for each in ast.walk(node)):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                found.add(name)
            case _:
                pass
    return found


def _place(node: Definition) -> str:
    return f"{node.name!r} in line {node.lineno}"
