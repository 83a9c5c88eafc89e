"""Messages between tests and the code under test."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scoring.sandbox.calls import SandboxLimits, run_programs, run_tests
from millrace.scoring.sandbox.frames import frame, frames, pack, unpack, write_back

LIMITS = SandboxLimits(time_s=30.0)

CODE = """
import math
from collections import Counter, deque, namedtuple
from enum import Enum
from fractions import Fraction
class Empty(LookupError): pass
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __getitem__(self, index): return self.items[index]
    def __lt__(self, other): return len(self) < len(other)
def same(*args, **kwargs): return (args, kwargs)
def sort(items): items.sort()
def deepen(tree): tree["a"][0].append(1)
def count(n):
    for i in range(n): yield i
def words(text): return Counter(text.split())
def half(): return Fraction(1, 2)
def size(stack): return len(stack)
def fail(): int("x")
def adder(n): return lambda x: x + n
class Vector:
    Unit = namedtuple("Unit", "x")
    def __init__(self, x): self.x = x
    def __mul__(self, k): return Vector(self.x * (k.x if isinstance(k, Vector) else k))
    def __neg__(self): return Vector(-self.x)
    def __eq__(self, other): return self.x == other.x
    def __repr__(self): return f"Vector({self.x})"
class Color(Enum):
    RED = 1
def nodes(n):
    head = None
    for i in range(n): head = Node(i, head)
    return head
class Node:
    def __init__(self, title, next): self.title, self.next = title, next
def windows(items): return deque(items, 2), range(len(items)), {1: 2}.keys()
def turn(queue): queue.rotate(1)
LIMIT = 10
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert LIMIT == 10 and math.isclose(math.pi, 3.14159, rel_tol=1e-3)",
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.items == [1, 2] and 2 in s",
        "s = Stack([1])\nassert s.pop() == 1\ntry:\n    s.pop()\n    assert 0\n"
        "except Empty as e:\n    assert str(e) == 'nothing there' and isinstance(e, LookupError)",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2])",
        "assert (Stack([1]) + Stack([2])).items == [1, 2] and Stack() < Stack([1])",
        "s = Stack()\ns.items = [5]\nassert s[0] == 5 and Stack.limit == 3",
        "assert size(Stack([1, 2])) == 2",
        "assert same(1, 'a', None, key=[2.5]) == ((1, 'a', None), {'key': [2.5]})",
        "assert same({1: (2, {3})}, b'x', 1j)[0] == ({1: (2, {3})}, b'x', 1j)",
        "assert same(10**5000)[0] == (10**5000,)",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "inner = []\ndeepen({'a': [inner]})\nassert inner == [1]",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6",
        "assert words('a b a') == {'a': 2, 'b': 1} and half() == 0.5",
        "assert adder(2)(3) == 5",
        "from itertools import islice\ng = count(9)\nassert next(g) == 0\n"
        "assert list(islice(g, 2)) == [1, 2] and list(islice(g, 2)) == [3, 4]",
        "assert (Vector(2) * 3).x == 6 and -Vector(1) * Vector(2) == Vector(-2)",
        "assert str(Vector(2)) == 'Vector(2)' and repr(-Vector(2)) == 'Vector(-2)'",
        "assert Vector.Unit(1) == (1,) and Color.RED.value == 1 and Color['RED'] == Color.RED",
        "node = nodes(2)\nwhile node.next: node = node.next\nassert node.title == 0",
        "from collections import deque\n"
        "assert windows([1, 2, 3]) == (deque([2, 3]), range(3), [1])\n"
        "q = deque([1, 2, 3])\nturn(q)\nassert q == deque([3, 1, 2])",
        "assert same(None, 1.5, {1}, (2,), {3: None})[0] == (None, 1.5, {1}, (2,), {3: None})",
        "try:\n    fail()\n    assert 0\nexcept ValueError as e:\n    assert 'literal' in str(e)",
        "from solution import same, Stack\nimport solution\nassert solution.LIMIT == 10",
        "def test_one(): assert LIMIT == 10\ndef check(f): assert f(1) == ((1,), {})\ncheck(same)",
    ],
)
def test_tests_use_the_code_like_a_local_module(test):
    assert run_tests(CODE, [test], limits=LIMITS) == [True]


@pytest.mark.parametrize(
    "test",
    [
        "assert LIMIT == 11",
        "undefined()",
        "def test_one(): assert LIMIT == 11",
        "async def test_one(): assert LIMIT == 10",
        "def test_one(): yield LIMIT == 10",
        "this is no Python",
        "import sys\nsys.exit(0)",
        "assert Stack([1]) == [1]",
        "same(lambda: 1)",
        "assert Vector(2) == 2",
        "assert next(nodes(1)).title == 0",
    ],
)
def test_test_that_does_not_finish_fails(test):
    assert run_tests(CODE, [test], limits=LIMITS) == [False]


CASE = "import unittest\nclass T(unittest.TestCase):\n    "
# Test code by what is special in it, with a check that code without a solution must fail.
CHECKS = {
    "function named test": "def test(): assert f(20) == 400",
    "function in camel case": "def testF(): assert f(20) == 400",
    "function with defaults": "def test_a(x=20, *, y=400): assert f(x) == y",
    "function that returns its result": "def test_a(): return f(20) == 400",
    "lambda": "test_a = lambda: 1 / (f(20) == 400)",  # its result does not matter
    "partial": "import functools\ndef go(x): assert f(x) == 400\n"
    "test_a = functools.partial(go, 20)",
    "object": "class Go:\n    def __call__(self): assert f(20) == 400\ntest_a = Go()",
    "bound method": "class Go:\n    def go(self): assert f(20) == 400\ntest_a = Go().go",
    "wrapper": "import functools\ndef wrapped(go): return functools.wraps(go)(lambda: go(20))\n"
    "@wrapped\ndef test_a(x): assert f(x) == 400",
    "helper with arguments": "def test_a(x): assert f(x) == 400\ntest_a(20)",
    "helper of a library": "from doctest import testmod\nassert f(20) == 400",
    "nested class": "class TestA:\n    class TestB:\n        def test_a(self): assert f(20) == 400",
    "nested test case": "import unittest\nclass A:\n    class B(unittest.TestCase):\n"
    "        def test_a(self): self.assertEqual(f(20), 400)",
    "lambda in a class": "class TestA:\n    test_a = lambda self: None if f(20) == 400 else 1 / 0",
    "data in a class": "class TestA:\n    test_data = [20]\n"
    "    def test_a(self): assert f(*self.test_data) == 400",
    "asynchronous test case": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test_a(self): self.assertEqual(f(20), 400)",
    "script": "def check(candidate): assert candidate(20) == 400\n"
    "if __name__ == '__main__':\n    check(f)",
    "script of unittest": f"{CASE}def test_a(self): self.assertEqual(f(20), 400)\n"
    "if __name__ == '__main__':\n    unittest.main()",
    "script of unittest, unguarded": f"from unittest import main\n{CASE}"
    "def test_a(self): self.assertEqual(f(20), 400)\nmain()",
}


def test_every_kind_of_test_runs():
    tests = [*CHECKS.values()]
    honest = run_tests("def f(x): return x * x", tests, limits=LIMITS)
    assert [kind for kind, ok in zip(CHECKS, honest, strict=True) if not ok] == []
    wrong = run_tests("def f(x): return 0", tests, limits=LIMITS)
    assert [kind for kind, ok in zip(CHECKS, wrong, strict=True) if ok] == []


@pytest.mark.parametrize(
    "test",
    [
        f"{CASE}async def test_a(self): self.assertEqual(LIMIT, 10)",
        f"{CASE}def test_a(self): yield self.assertEqual(LIMIT, 10)",
        f"{CASE}@unittest.skip('slow')\n    def test_a(self): self.assertEqual(LIMIT, 10)",
        f"{CASE}def test_a(self): self.skipTest('slow')",
        f"{CASE}@unittest.expectedFailure\n    def test_a(self): self.assertEqual(LIMIT, 11)",
        "class TestA:\n    async def test_a(self): assert LIMIT == 10",
        "import functools\nasync def go(x): assert LIMIT == x\ntest_a = functools.partial(go, 10)",
        "test_a = lambda: LIMIT == 11",
    ],
)
def test_test_that_does_not_run_fails(test):
    assert run_tests(CODE, [test], limits=LIMITS) == [False]


def test_tests_do_not_see_each_others_names():
    tests = ["x = 1\nassert LIMIT == 10", "assert x == 1"]
    assert run_tests(CODE, tests, limits=LIMITS) == [True, False]


def test_tests_share_the_state_of_the_code_and_inputs_do_not():
    code = "calls = []\ndef f():\n    calls.append(1)\n    return len(calls)\nprint(f())"
    tests = [f"assert f() == {count}" for count in (2, 3, 4)]
    assert run_tests(code, tests, limits=LIMITS) == [True] * 3
    assert [ran.output for ran in run_programs(code, ["", ""], limits=LIMITS)] == ["1\n"] * 2


def test_programs_read_stdin_and_report_success():
    code = (
        "import sys\nif __name__ == '__main__':\n    n = int(input())\n    sys.exit(print(n) or n)"
    )
    ran = run_programs(code, ["0", "3", "x"], limits=LIMITS)
    assert [one.ok for one in ran] == [True, False, False]
    assert ran[0].output == "0\n"


def test_programs_run_with_any_number_of_inputs():
    ran = run_programs("print(input())", [str(n) for n in range(120)], limits=LIMITS)
    assert [one.output for one in ran] == [f"{n}\n" for n in range(120)]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.sets(st.text(), max_size=4)
    ),
    max_leaves=6,
)


def refuse(value):
    raise TypeError(value)


@settings(max_examples=50, deadline=None)
@given(plain)
def test_pack_and_unpack_are_inverse(value):
    back = unpack(pack(value, other=refuse), other=refuse)
    assert back == value
    assert type(back) is type(value)


@settings(max_examples=50, deadline=None)
@given(plain, plain)
def test_write_back_makes_values_equal(original, changed):
    assert write_back(original, changed) == changed


def test_cut_off_frame_is_no_message():
    data = frame({"ok": True}) + frame("x" * 20)
    for size in range(len(frame({"ok": True})), len(data)):
        assert frames(data[:size]) == [{"ok": True}]
    assert frames(data) == [{"ok": True}, "x" * 20]


def test_time_to_parse_frames_grows_with_their_size_alone():
    messages = ["x" * 4096] * 4096
    data, bodies = b"".join(map(frame, messages)), [json.dumps(m).encode() for m in messages]
    start_s = time.thread_time()
    for body in bodies:
        json.loads(body)
    json_s = time.thread_time() - start_s
    assert frames(data) == messages
    # A copy of the rest for each frame takes a hundred times as long as the JSON.
    assert time.thread_time() - start_s - json_s < 15 * json_s
