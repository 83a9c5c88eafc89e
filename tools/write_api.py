"""Write docs/reference/api.md, the public names of the package: `python tools/write_api.py`.

It reads the source and imports nothing, so the page does not depend on what is installed.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef
INTRODUCTION = """# Python API

`import millrace as mr` gives these names. The classes that losses, scorers, transports and engines
of your own derive from or import are named in CONTRIBUTING.md. Everything else is internal and may
change. Guides show them in use: [scorers](../how-to/scorers.md),
[environments](../how-to/environments.md), [adapters](../how-to/other-environments.md),
[programs](../how-to/serve.md#training-a-program).

`python tools/write_api.py` writes this page from the docstrings in `src/millrace/`.
"""
FIRST = ("train", "RunResult", "Task", "Agent", "Reply", "EpisodeOver", "ToolError")
INTERNAL = ("rollouts",)  # methods for the rest of the package
ELSEWHERE = {
    "RunConfig": "All settings of a run, as a frozen pydantic model; see"
    " [configuration](configuration.md).",
    "verifiers": "The module of the built-in verifiers, which are reward functions; see"
    " [verifiers](../how-to/verifiers.md).",
}


def page() -> str:
    homes, names = _public_names()
    order = [*FIRST, *sorted(set(names) - set(FIRST))]
    parts = [ELSEWHERE.get(name) or _entry(name, homes[name]) for name in order]
    headed = [
        f"## `mr.{name}`\n\n{part.rstrip()}\n" for name, part in zip(order, parts, strict=True)
    ]
    return "\n".join([INTRODUCTION, *headed])


def _public_names() -> tuple[dict[str, str], list[str]]:
    """The module of each public name, and the names, as millrace/__init__.py lists them."""
    values: dict[str, ast.expr] = {}
    for node in _tree("millrace").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    names = [name for name in ast.literal_eval(values["__all__"]) if name != "__version__"]
    return ast.literal_eval(values["_HOMES"]), names


def _file(module: str) -> Path:
    path = ROOT / "src" / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _entry(name: str, module: str) -> str:
    """Signature and docstrings of a function or class, followed through re-exports."""
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _entry(name, str(node.module))
        if isinstance(node, Function) and node.name == name:
            return f"{_code(node, name=f'mr.{name}')}\n\n{_text(node)}"
        if isinstance(node, ast.ClassDef) and node.name == name:
            text = _text(node)
            if not text and not node.decorator_list:  # the module is about this class
                text = _prose(ast.get_docstring(tree) or "")
            lines = _file(module).read_text().splitlines()
            return "\n\n".join(filter(None, [text, *_fields(node, lines), *_methods(node)]))
    raise SystemExit(
        f"millrace.{name} is not defined in {module}; correct src/millrace/__init__.py."
    )


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """A table of the fields. A comment beside a field, or a docstring below it, explains it."""
    rows: list[str] = []
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if item.value and "repr=False" in ast.unparse(item.value):  # internal
            continue
        note = lines[(item.end_lineno or item.lineno) - 1].partition("  # ")[2]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            note = _prose(str(below.value.value)).replace("\n", " ")
        cells = (f"`{item.target.id}`", f"`{ast.unparse(item.annotation)}`", note)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        yield "\n".join(["| field | type | |", "|---|---|---|", *rows])


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if not isinstance(item, Function) or item.name in INTERNAL:
            continue
        is_property = any(ast.unparse(one) == "property" for one in item.decorator_list)
        if item.name == "__init__" and _text(item):
            yield f"{_code(item, name=f'mr.{node.name}')}\n\n{_text(item)}"
        elif not item.name.startswith("_") and is_property:
            kind = ast.unparse(item.returns) if item.returns else "Any"
            yield f"`{item.name}: {kind}`\n\n{_text(item)}".rstrip()
        elif not item.name.startswith("_") and _text(item):
            yield f"{_code(item, name=item.name)}\n\n{_text(item)}"


def _code(node: Function, *, name: str) -> str:
    """The signature as a code block, on one line if it fits."""
    if node.args.args and node.args.args[0].arg == "self":
        del node.args.args[0]
    parts = [
        re.sub(r"^(\w+: [^=]+)=", r"\1 = ", part) for part in _split(ast.unparse(node.args)) if part
    ]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    head = ("await " if isinstance(node, ast.AsyncFunctionDef) else "") + name
    if any(ast.unparse(one) == "contextlib.asynccontextmanager" for one in node.decorator_list):
        head = f"async with {name}"
        returns = re.sub(r"AsyncIterator\[(.+)\]", r"\1", returns)
    code = f"{head}({', '.join(parts)}){returns}"
    if len(code) > WIDTH:
        code = f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"
    return "```\n" + code.replace("'", '"') + "\n```"


def _split(arguments: str) -> list[str]:
    """Arguments at the commas outside of brackets."""
    depth, parts = 0, [""]
    for char in arguments:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _text(node: Function | ast.ClassDef) -> str:
    return _prose(ast.get_docstring(node) or "")


def _prose(docstring: str) -> str:
    """A docstring as Markdown. Its indented lines are code there, too; pages it names are links."""
    return re.sub(r"docs/((?:[\w-]+/)*([\w-]+)\.md)", r"[\2](../\1)", inspect.cleandoc(docstring))


if __name__ == "__main__":
    PAGE.write_text(page())
