import asyncio
import time
from typing import Literal

import pytest

from millrace.core.errors import TaskError
from millrace.environments.tools.functions import run_tool, tool_of, tools_of


def search(query: str, limit: int = 3, *, order: Literal["old", "new"] = "new") -> list[str]:
    """Look things up.

    More about it.

    Args:
        query: What to look for.
        limit (int): How many
            to return.

    Returns:
        what: was found
    """
    return [query] * limit


def later(key: str) -> str:
    """Comes late."""
    time.sleep(30)
    return key


async def told(function, /, *, timeout_s=5.0, max_chars=100, **arguments):
    return await run_tool(tool_of(function), arguments, timeout_s=timeout_s, max_chars=max_chars)


def test_type_hints_and_docstring_become_the_schema():
    assert tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look things up.\n\nMore about it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "limit": {
                        "type": "integer",
                        "default": 3,
                        "description": "How many to return.",
                    },
                    "order": {"type": "string", "enum": ["old", "new"], "default": "new"},
                },
                "required": ["query"],
            },
        },
    }


async def test_tool_results_that_are_not_text_become_json():
    result = await told(search, query="é", limit=2)
    assert (result.text, result.fault) == ('["é", "é"]', None)


async def test_async_tool_is_awaited():
    async def double(x: int) -> int:
        """Twice."""
        await asyncio.sleep(0)
        return 2 * x

    assert (await told(double, x=4)).text == "8"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "Error: the argument 'query' is missing."),
        ({"query": "a", "limt": 1}, "Error: there is no argument 'limt'."),
        ({"query": "a", "limit": "x"}, "Error: the argument 'limit' does not fit: Input should be"),
        ({"query": "a", "order": "up"}, "Error: the argument 'order' does not fit"),
    ],
)
async def test_wrong_arguments_are_reported_to_the_model(arguments, text):
    result = await run_tool(tool_of(search), arguments, timeout_s=5, max_chars=200)
    assert result.text.startswith(text)
    assert result.fault == "tool_errors"


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), StopIteration(), TimeoutError()]
)
async def test_raising_tool_fails_only_its_call(error):
    def broken(x: int) -> int:
        """Raises."""
        raise error

    result = await told(broken, x=1)
    assert type(error).__name__ in result.text
    assert result.fault == "tool_errors"


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_async_tool_that_exits_or_is_cancelled_fails_only_its_call(error):
    async def broken(x: int) -> int:
        """Raises."""
        raise error

    result = await told(broken, x=1)
    assert type(error).__name__ in result.text
    assert result.fault == "tool_errors"


async def test_hanging_tool_times_out_while_others_run():
    hanging = asyncio.create_task(told(later, timeout_s=0.2, key="a"))
    assert (await told(search, query="b", limit=1)).text == '["b"]'
    result = await hanging
    assert result.text == "Error: later took longer than 0.2 s and was given up."
    assert result.fault == "tool_timeouts"


async def test_long_tool_result_is_cut_with_a_note():
    def dump(x: int) -> str:
        """Much."""
        return "x" * 10_000_000

    result = await told(dump, x=1)
    assert result.text == f"{'x' * 100}\n[cut: the first 100 of 10000000 characters]"


async def test_surrogates_in_a_tool_result_are_replaced():
    def names(x: int) -> str:
        """File names."""
        if x:
            raise FileNotFoundError("caf\udce9")
        return "caf\udce9.txt"

    text = (await told(names, x=0)).text
    assert text == "caf?.txt"
    assert (await told(names, x=1)).text == "Error: FileNotFoundError: caf?"


def test_function_without_type_hints_raises_task_error():
    def untyped(x) -> str:
        return x

    def many(*xs: int) -> str:
        return ""

    with pytest.raises(TaskError, match="'untyped': 'x' has no type hint; add one"):
        tool_of(untyped)
    with pytest.raises(TaskError, match=r"'many' takes \*xs: int; a model passes arguments by"):
        tool_of(many)
    with pytest.raises(TaskError, match="Two tools are named 'search'"):
        tools_of([search, search])
