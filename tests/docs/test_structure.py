"""Class names are unique, and files, functions and folders are small enough to read."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import millrace

ROOT = Path(millrace.__file__).parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 12
DRAWERS = {"utils", "util", "common", "misc", "helpers", "helper", "base", "manager"}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for Triton kernels, which cannot be split freely."""
    return "triton.jit" in map(ast.unparse, function.decorator_list)


def test_class_names_are_unique():
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_files_and_functions_are_short():
    too_long = []
    for path, tree in modules().items():
        name = path.relative_to(ROOT)
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_FILE_LINES:
            too_long.append(f"{name}: {num_lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    assert too_long == []


def test_folders_are_small_and_have_no_drawers():
    folders: dict[Path, int] = defaultdict(int)
    for path in modules():
        assert path.stem not in DRAWERS, path
        if path.stem not in ("__init__", "__main__"):
            folders[path.parent] += 1
    assert {f: n for f, n in folders.items() if n > MAX_FOLDER_FILES} == {}


def test_median_file_length_is_moderate():
    sizes = sorted(
        len(path.read_text().splitlines()) for path in modules() if path.stem != "__init__"
    )
    assert 100 <= sizes[len(sizes) // 2] <= 200
