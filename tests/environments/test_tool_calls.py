import json
import re

import pytest
from families import FAMILIES, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from millrace.environments.tools.calls import FORMATS, format_of

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Looks up.",
        "parameters": {"properties": {"key": {"type": "string"}, "limit": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("chatml", "hermes"),
        ("qwen3", "hermes"),
        ("llama3", "llama3"),
        ("gemma", "gemma"),
        ("mistral", "mistral"),
    ],
)
def test_auto_format_is_recognised_by_the_chat_template(family: str, name: str):
    template = tokenizer_of(FAMILIES[family]).chat_template
    assert format_of("auto", template=template) is FORMATS[name]


WRITTEN = {
    "hermes": 'Let me.\n<tool_call>\n{"name": "search", "arguments": {"key": "a"}}\n</tool_call>',
    "llama3": '{"name": "search", "parameters": {"key": "a"}}',
    "mistral": '[TOOL_CALLS] [{"name": "search", "arguments": {"key": "a"}}]',
    "gemma": 'Let me see.\n```tool_code\nsearch(key="a")\n```',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_tool_call_is_parsed(name: str):
    parsed = FORMATS[name].parse(WRITTEN[name], [SCHEMA])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("search", {"key": "a"})]
    assert parsed.problems == ()


def test_variants_of_tool_calls_are_parsed():
    hermes, mistral, llama3, gemma = FORMATS.values()
    two = hermes.parse(f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}", [SCHEMA])
    assert [call.id for call in two.calls] == ["call00000", "call00001"]
    assert two.content == "Let me."
    unclosed = hermes.parse('<tool_call>{"name": "search", "arguments": "{}"}', [SCHEMA])
    assert unclosed.calls[0].arguments == {}
    tagged = llama3.parse('<|python_tag|>search.call(key="a")', [SCHEMA])
    assert tagged.calls[0].arguments == {"key": "a"}
    several = mistral.parse('[TOOL_CALLS]{"name": "search", "arguments": {}}', [SCHEMA])
    assert several.calls[0].name == "search"
    by_place = gemma.parse('```tool_code\nprint(search("a", limit=3))\n```', [SCHEMA])
    assert by_place.calls[0].arguments == {"key": "a", "limit": 3}


def test_call_inside_thinking_is_ignored():
    thought = "<think><tool_call>{}</tool_call></think>No need."
    assert FORMATS["hermes"].parse(thought, [SCHEMA]).calls == ()
    assert FORMATS["hermes"].parse(thought, [SCHEMA]).problems == ()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", "<tool_call>search(a)</tool_call>", r"cannot be read .*; write <tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'needs a "name"'),
        ("hermes", '<tool_call>{"name": "s", "arguments": [1]}</tool_call>', "must be an object"),
        ("llama3", '{"name": "search", "parameters": {', "cannot be read"),
        ("llama3", "<|python_tag|>search(x); search(y)", "cannot be read"),
        ("mistral", "[TOOL_CALLS][{]", "cannot be read"),
        ("mistral", "[TOOL_CALLS][3]", 'needs a "name"'),
        ("gemma", "```tool_code\nimport os\n```", "'import os' is not a call"),
        ("gemma", "```tool_code\nsearch(open('x'))\n```", "cannot be read"),
        ("gemma", "```tool_code\nsearch(1, 2, 3)\n```", "takes fewer arguments"),
        ("llama3", "<|python_tag|>search({(1, 2): 3})", "keys must be str"),
        ("llama3", "<|python_tag|>search(1j)", "1j cannot be an argument"),
        (
            "hermes",
            r'<tool_call>{"name": "search", "arguments": {"key": "\ud83d"}}</tool_call>',
            "surrogates not allowed",
        ),
    ],
)
def test_malformed_call_is_a_problem_for_the_model(name: str, text: str, problem: str):
    parsed = FORMATS[name].parse(text, [SCHEMA])
    assert parsed.calls == ()
    (sentence,) = parsed.problems
    assert re.search(problem, sentence)


def test_python_literals_become_json():
    parsed = FORMATS["llama3"].parse("<|python_tag|>search({1: (2, {3})}, limit=True)", [SCHEMA])
    assert parsed.calls[0].arguments == {"key": {"1": [2, [3]]}, "limit": True}


def test_llama_makes_only_the_first_of_several_calls():
    parsed = FORMATS["llama3"].parse('<|python_tag|>search("a"); search("b")', [SCHEMA])
    assert [call.arguments for call in parsed.calls] == [{"key": "a"}]
    assert "one at a time" in parsed.problems[0]


_MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```tool_code\n", "```"]
_PIECES = st.sampled_from(
    [*_MARKS, '{"name": "search"', "}", "[", "search(", "1)", "</think>", "\0"]
)


@given(
    st.lists(_PIECES | st.text(max_size=5), max_size=8).map("".join), st.sampled_from([*FORMATS])
)
def test_parse_never_raises(text: str, name: str):
    parsed = FORMATS[name].parse(text, [SCHEMA])
    json.dumps([call.arguments for call in parsed.calls], default=repr)
    FORMATS[name].reply(text, parsed)


def test_gemma_introduces_tools_in_the_first_user_message():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    shown, schemas = FORMATS["gemma"].shown(messages, [SCHEMA])
    assert schemas == []
    assert shown[0] == messages[0]
    assert shown[1]["content"].endswith("\n\nu")
    assert '"search"' in shown[1]["content"]
    assert messages[1]["content"] == "u"
