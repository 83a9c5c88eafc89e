"""Each verifier by hand, its settings, and its way to a scorer process."""

import json
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.records import Task
from millrace.scoring.functions.user_function import inspect_reward
from millrace.scoring.pool import check_scorers, resolve_scorers
from millrace.scoring.verifiers import VERIFIERS
from millrace.scoring.verifiers.answers import last_number

v = mr.verifiers


def score(verifier, text, answer=None):
    """The score of one completion with its column value."""
    (column,) = getattr(verifier, "needed_columns", ("nothing",))
    (reward,) = verifier(completions=[text], **{column: [answer]})
    return reward


@pytest.mark.parametrize(
    ("settings", "text", "answer", "reward"),
    [
        ({}, " Paris\n", "Paris", 1),
        ({}, "New   York", "New York", 1),
        ({}, "paris", "Paris", 0),
        ({}, "", "", 1),
        ({}, "42", 42, 1),
        ({}, "b", ["a", "b"], 1),
        ({}, "c", ["a", "b"], 0),
        ({}, "caf\u0065\u0301", "caf\u00e9", 1),
        ({}, "Paris", None, None),
        ({"ignore_case": True}, "STRASSE", "straße", 1),
        ({"ignore_punctuation": True}, "It's Paris!", "Its Paris", 1),
        ({"ignore_space": False}, "Paris ", "Paris", 0),
        ({"after": "####"}, "#### 3\n#### 4", "4", 1),
        ({"after": "####"}, "4", "4", 0),
        ({"column": "city"}, "Paris", "Paris", 1),
    ],
)
def test_exact(settings, text, answer, reward):
    assert score(v.Exact(**settings), text, answer) == reward


def test_last_message_of_a_chat_is_scored():
    chat = [{"role": "assistant", "content": "Paris"}]
    assert v.Exact()(completions=[chat, "Rome"], answer=["Paris", "Paris"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("1 then 2, then 3", 3),
        ("-7", -7),
        ("\u22127", -7),
        ("it is +5", 5),
        ("- 5 apples", 5),  # an item of a list
        ("5-3", 3),
        ("x=-3", -3),
        ("(5)-3", 3),
        ("1,234,567.5", Fraction("1234567.5")),
        ("1,2", 2),
        ("12,3456", 3456),
        ("$1,000", 1000),
        ("-$5", -5),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1/0", None),
        ("6.02e23", 602 * 10**21),
        ("1E-3", Fraction(1, 1000)),
        ("6.02 \u00d7 10^23", 602 * 10**21),
        (r"3 \times 10^{-2}", Fraction(3, 100)),
        ("2*10**3", 2000),
        ("50%", 50),
        ("v2", None),
        ("none", None),
        ("", None),
        ("9" * 5000, None),
        ("1e999999999", None),
        ("1e" + "9" * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.integers() | st.floats(-1e290, 1e290).filter(lambda x: x == 0 or abs(x) > 1e-290))
def test_a_number_is_read_as_python_writes_it(number):
    assert last_number(f"so {number!r}.") == Fraction(repr(number))


@given(st.integers(), st.text(alphabet="abc \n.,", max_size=20))
def test_words_around_a_number_do_not_matter(number, words):
    assert last_number(f"{words} {number:,} {words.replace('.', '')}") == number


@pytest.mark.parametrize(
    ("settings", "text", "answer", "reward"),
    [
        ({}, "so 1/2", "0.5", 1),
        ({}, "0.1", 0.1, 1),
        ({}, "12345678901234567890", "12345678901234567891", 0),
        ({}, "no idea", "3", 0),
        ({}, "3", None, None),
        ({"tolerance": 0.01}, "3.14", "3.15", 1),
        ({"tolerance": 0.01}, "3.14", "3.1501", 0),
        ({"relative_tolerance": 0.01}, "99", "100", 1),
        ({"relative_tolerance": 0.01}, "98", "100", 0),
        ({"after": "####"}, "7 #### 8 apples", "8", 1),
        ({"after": "####"}, "8", "8", 0),
        ({}, "#### 18", "9+9=18\n#### 18", 1),  # a reference may be a worked solution
    ],
)
def test_numeric(settings, text, answer, reward):
    assert score(v.Numeric(**settings), text, answer) == reward


@pytest.mark.parametrize(
    ("settings", "text", "reward"),
    [
        ({"pattern": r"\d+"}, "12", 1),
        ({"pattern": r"\d+"}, "12 ", 0),
        ({"pattern": r"\d+", "match": "search"}, "so 12.", 1),
        ({"pattern": r"(?s)<think>.*</think>\s*\S+"}, "<think>a\nb</think> c", 1),
        ({"pattern": "(?P<a>x)?(?P<b>y)?", "scores": {"a": 0.25, "b": 0.5}}, "xy", 0.75),
        ({"pattern": "(?P<a>x)?(?P<b>y)?", "scores": {"a": 0.25, "b": 0.5}}, "y", 0.5),
        ({"pattern": "(?P<a>x)?(?P<b>y)?", "scores": {"a": 0.25, "b": 0.5}}, "z", 0),
    ],
)
def test_regex(settings, text, reward):
    assert score(v.Regex(**settings), text) == reward


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"n": 1}', 1),
        ('{"n": "1"}', 0),
        ("{}", 0),
        ('{"n": 1', 0),
        ("", 0),
        ('{"n": NaN}', 0),
        ('Here:\n```json\n{"n": 1}\n```\nDone.', 1),
        ('```json\n{"n": 1}\n```\n```json\n{}\n```', 0),
        ('```\n{"n": 1}\n```', 1),
        ("[" * 100_000, 0),
        ('{"n": ' + "9" * 5000 + "}", 0),
    ],
)
def test_json_schema(text, reward):
    assert score(v.JsonSchema(schema=SCHEMA), text) == reward


@pytest.mark.parametrize("number", ["1e400", "1" + "0" * 400])
def test_number_beyond_floats_scores_0_under_a_schema_with_a_divisor(number):
    verifier = v.JsonSchema(schema={"type": "number", "multipleOf": 0.5})
    assert score(verifier, "2.5") == 1
    assert score(verifier, number) == 0


def test_a_schema_comes_from_a_file_and_may_forbid_fences(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    verifier = v.JsonSchema(path=str(path), extract=False)
    path.unlink()
    assert score(verifier, '{"n": 1}') == 1
    assert score(verifier, '```json\n{"n": 1}\n```') == 0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"$x \cdot x$", "x^2", 1),
        (r"the set is $\{2, 1\}$", r"\{1, 2\}", 1),
        ("The answer is 43.", "42", 0),
        ("no idea", "42", 0),
        ("42", 42, 1),
        ("42", None, None),
    ],
)
def test_math(text, answer, reward):
    assert score(v.Math(), text, answer) == reward


def test_endless_expression_affects_only_its_own_score():
    endless = r"\boxed{10^{10^{10}}}"
    rewards = v.Math(time_limit_s=1)(completions=[endless, r"\boxed{3}"], answer=["3", "3"])
    assert rewards == [0.0, 1.0]


SQUARE = "Sure:\n```python\ndef f(x):\n    return x * x\n```\nIt squares."
DOUBLE = "def f(x): return 2 * x"


@pytest.mark.parametrize(
    ("settings", "text", "tests", "reward"),
    [
        ({}, SQUARE, "assert f(3) == 9", 1),
        ({}, DOUBLE, "assert f(3) == 9", 0),
        ({}, DOUBLE, ["assert f(2) == 4", "assert f(3) == 9"], 0),
        ({"score": "share"}, DOUBLE, ["assert f(2) == 4", "assert f(3) == 9"], 0.5),
        ({}, "print(int(input()) ** 2)", [["3", "9\n"], ["4", "16  \n\n"]], 1),
        ({}, "print(int(input()) ** 2)", [{"input": "3", "output": "9"}], 1),
        ({"score": "share"}, "print(9)", [["3", "9"], ["4", "16"]], 0.5),
        ({}, "print(9)\nraise SystemExit(1)", [["3", "9"]], 0),
        ({}, "no code at all", "assert f(3) == 9", 0),
        ({"time_limit_s": 0.5}, "def f(x):\n    while True: pass", "assert f(3) == 9", 0),
        ({"memory_limit_bytes": 2**28}, "x = bytearray(2**28)\nprint(1)", [["", "1"]], 0),
        ({"output_limit_bytes": 10}, "print('x' * 11)", [["", "x" * 11]], 0),
        ({}, SQUARE, None, None),
    ],
)
def test_python_tests(settings, text, tests, reward):
    assert score(v.PythonTests(**settings), text, tests) == reward


@pytest.mark.parametrize("tests", [[], 3, [["a"]], ["assert f", ["a", "b"]], {"input": "a"}])
def test_invalid_tests_are_an_error(tests):
    with pytest.raises(ValueError, match=r"column 'tests' holds "):
        score(v.PythonTests(), SQUARE, tests)


CASE = "import unittest\nclass T(unittest.TestCase):\n    "
CHECK = "def check(c): assert c(3) == 9\n"


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ("", "it checks nothing"),
        ("'>>> f(3)'", "it checks nothing"),
        ("import math\nx = 3\ndef go(): assert f(3) == 9", "it checks nothing"),
        ("assert f(", "it cannot be parsed"),
        ("f(3) == 9", "line 1 compares without 'assert'"),
        ("x = 3\nassert (f(x) == 9, 'no')", "line 2 asserts a tuple, which is always true"),
        (f"METADATA = {{}}\n{CHECK}", "'check' in line 2 is never called"),
        (f"x = f(3)\n{CHECK}def go(): check(f)", "'check' in line 2 is never called"),
        ("def test_a(x): assert f(x) == 9", "'test_a' in line 1 is never called"),
        ("class A:\n    def test_a(self): assert f(3) == 9", "'A' in line 1 is never called"),
        (f"{CASE}def check_a(self): self.assertEqual(f(3), 9)", "'T' in line 2 is never called"),
        ("async def test_a(): assert f(3) == 9", "'test_a' in line 1 is asynchronous"),
        (f"{CASE}async def test_a(self): assert f(3) == 9", "'test_a' in line 3 is asynchronous"),
        ("def test_a(): assert f(3) == 9\ndef test_a(): pass", "'test_a' in line 2 replaces"),
        (["assert f(3) == 9", f"f(3)\n{CHECK}"], "'check' in line 2 is never called"),
    ],
)
def test_test_code_that_would_not_run_is_an_error(test, sentence):
    with pytest.raises(ValueError, match=f"column 'tests' holds test code .*: {sentence}"):
        score(v.PythonTests(), SQUARE, test)


USABLE = [
    "assert f(3) == 9",
    f"{CHECK}check(f)",
    f"{CHECK}def go(): check(f)\ngo()",
    f"{CHECK}globals()['check'](f)",
    f"{CHECK}if __name__ == '__main__':\n    check(f)",
    f"{CHECK}def test_a(x=3, *, y=9): check(f)",
    f"{CHECK}def unused(x): raise ValueError\ncheck(f)",
    "def test(c): assert c(3) == 9\ntest(f)",
    "def test(): assert f(3) == 9\ntest()\ndef test(): assert f(2) == 4\ntest()",
    "try:\n    f('') == 9\n    assert False\nexcept TypeError:\n    pass",
    "class TestA:\n    class TestB:\n        def test_a(self): assert f(3) == 9",
    "class TestA:\n    test_a = lambda self: 1 / (f(3) == 9)",
    f"{CASE}def runTest(self): self.assertEqual(f(3), 9)",
    "import unittest\nclass Mixin:\n    def test_a(self): self.assertEqual(f(3), 9)\n"
    "class T(Mixin, unittest.TestCase): pass",
    "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test_a(self): self.assertEqual(f(3), 9)",
    "import asyncio\nasync def test_a(x): assert f(x) == 9\nasyncio.run(test_a(3))",
]


def test_test_code_that_runs_is_accepted():
    share = v.PythonTests(time_limit_s=30.0, score="share")
    assert score(share, SQUARE, USABLE) == 1
    assert score(share, DOUBLE, USABLE) == 0


@pytest.mark.parametrize(
    ("verifier", "answer", "sentence"),
    [
        (v.Exact(), 3.5, "column 'answer' holds 3.5, which is not a text"),
        (v.Numeric(), "abc", "column 'answer' holds 'abc', which is not a number"),
        (v.Numeric(), True, "column 'answer' holds True, which is not a number"),
        (v.Math(), "", "column 'answer' holds '', which is not an expression"),
    ],
)
def test_invalid_reference_is_an_error(verifier, answer, sentence):
    with pytest.raises(ValueError, match=sentence):
        score(verifier, "3", answer)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            {"type": "nummeric"},
            "'scorers.1.type' = 'nummeric' is not known; did you mean 'numeric'",
        ),
        (
            {"type": "numeric", "colum": "a"},
            "'scorers.1.colum' of 'numeric'; did you mean 'column'",
        ),
        (
            {"type": "numeric", "tolerance": -1},
            "tolerance' = -1: input should be greater than or equal to 0",
        ),
        (
            {"type": "numeric", "tolerance": True},
            "tolerance' = True: input should be a valid number",
        ),
        ({"type": "exact", "column": ""}, "column' = '': string should have at least 1 character"),
        ({"type": "exact", "ignore_case": 1}, "ignore_case' = 1: input should be a valid boolean"),
        ({"type": "exact", "after": ""}, "after' = '': string should have at least 1 character"),
        ({"type": "regex"}, "pattern' is missing"),
        ({"type": "regex", "pattern": "("}, "is not a regular expression: missing"),
        ({"type": "regex", "pattern": "a", "match": "some"}, "input should be 'full' or 'search'"),
        ({"type": "regex", "pattern": "a", "scores": {"b": 1}}, "scores.b is not a group"),
        ({"type": "json_schema"}, "set either schema or path"),
        ({"type": "json_schema", "path": "/none.json"}, "'/none.json' cannot be read: No such"),
        ({"type": "json_schema", "schema": {"type": 3}}, "the schema is not valid: 3 is not"),
        (
            {"type": "math", "time_limit_s": 0.5},
            "time_limit_s' = 0.5: input should be a valid integer",
        ),
        (
            {"type": "python_tests", "score": "most"},
            "score' = 'most': input should be 'all' or 'share'",
        ),
        ({"type": "python_tests", "parallel": 0}, "parallel' = 0: input should be greater than 0"),
    ],
)
def test_invalid_setting_is_refused_before_anything_starts(table, sentence):
    config = load_config({"model": "m", "scorers": [{"function": "a:b", "name": "f"}, table]})
    with pytest.raises(ConfigError) as caught:
        resolve_scorers(config.scorers)
    assert sentence in str(caught.value)


def test_a_verifier_names_itself_and_the_column_it_needs():
    config = load_config(
        {"model": "m", "scorers": [{"type": "numeric", "column": "n"}, {"type": "exact"}]}
    )
    specs = resolve_scorers(config.scorers)
    assert [spec.name for spec in specs] == ["numeric", "exact"]
    check_scorers(specs, [Task(prompt="p", columns={"n": 3, "answer": "3"})])
    with pytest.raises(ConfigError, match="Reward 'numeric' needs the column 'n', which task 0"):
        check_scorers(specs, [Task(prompt="p", columns={"answer": "3"})])


@pytest.mark.parametrize("kind", VERIFIERS)
def test_every_verifier_can_be_shipped_as_a_reward_function(kind):
    if kind == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    required = {"regex": {"pattern": "a"}, "json_schema": {"schema": {}}}
    verifier = VERIFIERS[kind](**required.get(kind, {}))
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    function = inspect_reward(verifier, name=verifier.__name__)
    assert (function.name, function.is_async) == (kind, False)
    column = {name: [None] for name in getattr(verifier, "needed_columns", ())}
    rewards = function(prompts=["p"], completions=["a"], completion_ids=[[1]], columns=column)
    assert len(rewards) == 1
