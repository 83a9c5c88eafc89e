"""Messages between tests and the code under test, and results that the code cannot forge."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.scoring.sandbox.calls import SandboxLimits, run_programs, run_tests
from millrace.scoring.sandbox.frames import pack, unpack, write_back

LIMITS = SandboxLimits(time_s=30.0)
FORGERIES = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "leaves by an exception": "def f(x): raise SystemExit(0)",
    "prints results": """
import json, os, struct
data = json.dumps({"ok": True}).encode()
for fd in range(64):
    try: os.write(fd, (struct.pack("<Q", len(data)) + data) * 4)
    except OSError: pass
def f(x): return 0
""",
    "prints and leaves": """
import json, os, struct
data = json.dumps({"ok": True}).encode()
def f(x):
    for fd in range(64):
        try: os.write(fd, (struct.pack("<Q", len(data)) + data) * 4)
        except OSError: pass
    os._exit(0)
""",
    "equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __bool__(self): return True
def f(x): return Any()
""",
    "is a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(x): return Any(0)
""",
    "patches the harness": """
import builtins, sys
for name, module in list(sys.modules.items()):
    if name.startswith("millrace") and not name.endswith("frames"):
        for key, value in list(vars(module).items()):
            if callable(value) and not key.startswith("__"):
                setattr(module, key, lambda *args, **kwargs: {"ok": True, "value": True})
builtins.AssertionError = SystemExit
builtins.compile = builtins.exec = lambda *args: None
def f(x): return 0
""",
    "replaces modules": """
import sys
for name in list(sys.modules):
    if name not in ("sys", "builtins"):
        sys.modules[name] = sys.modules["sys"]
def f(x): return 0
""",
    "redefines what the tests use": """
def abs(x): return 0
def isinstance(*args): return True
def f(x): return 0
class AssertionError(Exception): pass
__debug__name = "off"
""",
    "looks for the tests": """
import gc, os, sys
def hunt():
    frame = sys._getframe()
    while frame:
        yield from frame.f_locals.values()
        frame = frame.f_back
    yield from gc.get_objects()
def f(x):
    for thing in hunt():
        if isinstance(thing, str) and "f(20)" in thing and "hunt" not in thing:
            return int(thing.split("==")[1])
    for fd in range(5, 64):
        try: print(os.read(fd, 1000))
        except OSError: pass
    return 0
""",
    "returns too much": "def f(x): return 'x' * 2**24",
    "returns itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "answers nonsense": """
import os, struct
for text in (b'[]', b'{"names": 3}', b'{"names": {"f": ["module", "os.no"]}}', b'\\xff'):
    os.write(4, struct.pack("<Q", len(text)) + text)
def f(x): return 0
""",
    "answers nonsense when called": """
import os, struct
def f(x):
    text = b'{"value": ["Fraction", "1/0"]}'
    os.write(4, struct.pack("<Q", len(text)) + text)
""",
    "does not load": "def f(x) return 0",
    "needs what is not there": "import no_such_module\ndef f(x): return 400",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_passes_a_test(name):
    tests = [
        "assert f(20) == 400",
        "assert abs(f(20) - 400) < 1e-6",
        "try:\n    f(20) == 400 or 1/0\nexcept Exception:\n    raise AssertionError",
    ]
    honest = "def f(x): return x * x"
    assert run_tests(honest, tests, limits=LIMITS) == [True] * 3
    assert run_tests(FORGERIES[name], tests, limits=SandboxLimits(time_s=1.5)) == [False] * 3


def test_exited_code_fails_even_a_test_that_expects_an_error():
    expects = "try:\n    f()\nexcept BaseException:\n    pass\nelse:\n    assert False"
    assert run_tests("def f(): raise KeyError", [expects], limits=LIMITS) == [True]
    assert run_tests("import os\ndef f(): os._exit(0)", [expects], limits=LIMITS) == [False]


CODE = """
import math
from collections import Counter, namedtuple
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
        "this is no Python",
        "import sys\nsys.exit(0)",
        "assert Stack([1]) == [1]",
        "same(lambda: 1)",
    ],
)
def test_test_that_does_not_finish_fails(test):
    assert run_tests(CODE, [test], limits=LIMITS) == [False]


def test_tests_do_not_see_each_others_names():
    tests = ["x = 1\nassert LIMIT == 10", "assert x == 1"]
    assert run_tests(CODE, tests, limits=LIMITS) == [True, False]


def test_programs_read_stdin_and_report_success():
    code = (
        "import sys\nif __name__ == '__main__':\n    n = int(input())\n    sys.exit(print(n) or n)"
    )
    ran = run_programs(code, ["0", "3", "x"], limits=LIMITS)
    assert [one.ok for one in ran] == [True, False, False]
    assert ran[0].output == "0\n"


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
