"""Code that tries to pass tests without a solution, and to see what the tests expect."""

import pytest

from millrace.scoring.sandbox.calls import SandboxLimits, run_tests

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


# An object that answers every operation as the test hopes, and notes what it learns.
LIAR = """
seen = []
def learned(): return [thing for thing in seen if isinstance(thing, (int, float, str, list, set))]
def answer(self, *args):
    seen.extend(args)
    return ANSWER
def agree(self, *args):
    seen.extend(args)
    return True
class Liar(BASE):
    def __ne__(self, other): return not agree(self, other)
    def __hash__(self): return hash(400)
    def __len__(self): return 2
    def __iter__(self): return iter(())
    def __next__(self): raise StopIteration
    def __float__(self): return 400.0
    def __int__(self): return 400
    def __getattr__(self, name): return lambda *args: answer(self, *args)
    def __format__(self, spec): return "400"
    __index__ = __int__
    __repr__ = __str__ = lambda self: "no text"
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = agree
    __instancecheck__ = __subclasscheck__ = startswith = issubset = agree
    __add__ = __sub__ = __mul__ = __truediv__ = __mod__ = __pow__ = __xor__ = __getitem__ = answer
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmod__ = __rpow__ = __rxor__ = answer
    __abs__ = __neg__ = __round__ = __floor__ = __trunc__ = __array__ = count = answer
def f(x): return Liar()
"""
LIARS = {
    "answers 0": LIAR.replace("ANSWER", "0"),
    "answers itself": LIAR.replace("ANSWER", "self"),
    "answers a liar whose truth value is False": LIAR.replace("ANSWER", "No()")
    + "class No(Liar):\n    def __bool__(self): return False\n    def __len__(self): return 0",
    "is the function": LIAR.replace("ANSWER", "0").replace("def f(x): return Liar()", "")
    + "class f(Liar):\n    def __init__(self, x): pass",
    "is a class": LIAR.replace("ANSWER", "0")
    .replace("BASE", "type")
    .replace("Liar()", "Liar('A', (), {})"),
    "is raised": LIAR.replace("ANSWER", "0")
    .replace("BASE", "Exception")
    .replace("return Liar()", "raise Liar()"),
    "is an int": LIAR.replace("ANSWER", "0").replace("BASE", "int"),
    "is a float": LIAR.replace("ANSWER", "0.0").replace("BASE", "float"),
    "is a text": LIAR.replace("ANSWER", "0").replace("BASE", "str"),
    "is a dict": LIAR.replace("ANSWER", "0").replace("BASE", "dict"),
    "is in a list": LIAR.replace("ANSWER", "0").replace("return Liar()", "return [Liar()] * 2"),
}
# What tests write that expect a number, and code that passes them.
NUMBER = [
    "assert f(20) == 400",
    "assert 400 == f(20) and not 400 != f(20)",
    "assert abs(f(20) - 400) < 1e-6",
    "assert abs(400 - f(20)) < 1e-6",
    "assert not (f(20) - 400)",
    "assert not (f(20) ^ 400)",
    "assert f(20) % 400 == 0 and f(20) / 400 == 1",
    "assert (f(20) - 400) ** 2 < 1e-6",
    "assert round(f(20) - 400, 6) == 0",
    "assert 399 < f(20) < 401",
    "assert f(20) in {400} or f(20) in [400]",
    "assert int(f(20)) == 400 and float(f(20)) == 400.0",
    "assert f'{f(20)}' == '400' or '%d' % f(20) == '400'",
    "assert isinstance(f(20), int) and f(20)",
    "import math\nassert math.isclose(f(20), 400)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(20), 400)",
    "assert [1, 2][f(20) - 400] == 1",
    "assert [f(20), 1] == [400, 1] or {'a': f(20)} == {'a': 400}",
    "assert sum([f(20)]) == 400",
    "try:\n    assert f(20) == 400\nexcept ValueError:\n    pass",
]
OTHERS = {
    "lambda x: str(x * x)": [
        "assert f(20).startswith('4') and f(20).count('0') == 2",
        "assert '40' in f(20)",
    ],
    "lambda x: [x, x * x]": [
        "assert 400 in f(20)",
        "r = f(20)\nassert len(r) == 2\nfor a, b in zip(r, [20, 400], strict=False): assert a == b",
        "r = f(20)\nassert r[0] < 100 < r[1]",
    ],
    "lambda x: {x, x * x}": [
        "assert f(20).issubset({20, 400}) and len(f(20)) == 2",
        "assert len(f(20) - {20, 400}) == 0",
    ],
}


@pytest.mark.parametrize("name", LIARS)
def test_no_object_passes_for_data(name):
    code = LIARS[name].replace("BASE", "object")
    tests = [*NUMBER, *(test for tests in OTHERS.values() for test in tests)]
    *passed, is_blind = run_tests(code, [*tests, "assert learned() == []"], limits=LIMITS)
    assert [test for test, ok in zip(tests, passed, strict=True) if ok] == []
    assert is_blind


def test_methods_of_test_classes_are_run():
    case = (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 20\n"
        "    def test_a(self): self.assertEqual(f(self.x), 400)"
    )
    plain = (
        "class TestIt:\n    def test_a(self): assert f(20) == 400\nclass Help:\n    test_b = None"
    )
    assert run_tests("def f(x): return x * x", [case, plain], limits=LIMITS) == [True, True]
    assert run_tests("def f(x): return 0", [case, plain], limits=LIMITS) == [False, False]


def test_honest_code_passes_the_same_tests():
    assert all(run_tests("def f(x): return x * x", NUMBER, limits=LIMITS))
    for honest, tests in OTHERS.items():
        assert all(run_tests(f"f = {honest}", tests, limits=LIMITS))


SORTED_PERMUTATION = """
r = NAME([3, 1, 2])
assert sorted(r) == [1, 2, 3]
previous = 0
for value in r:
    assert value >= previous
    previous = value
"""
# By name: code, and a test that it must not pass. All of it is loaded at once.
TRICKS = {
    "ends_the_loop": (
        "def ends_the_loop(x): raise StopIteration",
        "assert all(map(lambda case: ends_the_loop(case[0]) == case[1], [(20, 400)]))",
    ),
    "ends_the_loop_by_a_subclass": (
        "class End(StopIteration): pass\ndef ends_the_loop_by_a_subclass(x): raise End",
        "assert list(map(ends_the_loop_by_a_subclass, [20])) == []",
    ),
    "changes_its_items": (
        "class Two:\n    turns = iter([[3, 1, 2], [1, 2, 3]])\n"
        "    def __iter__(self): return iter(next(self.turns))\n"
        "def changes_its_items(x): return Two()",
        SORTED_PERMUTATION,
    ),
    "is_used_up": ("def is_used_up(x): yield from x", SORTED_PERMUTATION),
    "starts_again": (
        "class Again:\n    items = [3, 1, 2]\n    def __iter__(self): return self\n"
        "    def __next__(self):\n        if self.items: return self.items.pop()\n"
        "        self.items = [3, 2, 1]\n        raise StopIteration\n"
        "def starts_again(x): return Again()",
        SORTED_PERMUTATION,
    ),
    "isclose": (
        "def isclose(*args, **kwargs): return True",
        "from math import isclose\nfrom solution import *\nassert isclose(1, 2)",
    ),
    "math": (
        "class math:\n    isclose = staticmethod(lambda *args: True)",
        "assert math.isclose(1, 2)",
    ),
    "Counted": (
        "class Counted:\n    def __init__(self, x): pass\n    def __sub__(self, other): return 0",
        "assert abs(Counted(20) - 400) < 1e-6",
    ),
    "Derived": (
        "class Derived:\n    def __init__(self, x): pass\n    def __sub__(self, y): return self\n"
        "    def __abs__(self): return 0\n    def __bool__(self): return False",
        "assert not (Derived(20) - 400) or abs(Derived(20) - 400) < 1",
    ),
    "Member": (
        "class Member:\n    def __contains__(self, item): return True",
        "assert 400 in Member()",
    ),
    "Itself": (
        "class Itself:\n    def f(self, x): return self\n    def __sub__(self, other): return 0\n"
        "    def __len__(self): return 2",
        "assert len(Itself().f(20)) == 2 or abs(Itself().f(20) - 400) < 1e-6",
    ),
    "Holder": (
        "class Text:\n    def startswith(self, prefix): return True\n"
        "class Holder:\n    text = Text()",
        "assert Holder().text.startswith('a')",
    ),
    "isclose_of_a_star": (
        "def isclose_of_a_star(): pass",
        "from math import *\nfrom solution import *\nassert isclose(1, 2)",
    ),
    "expected": (
        "expected = 0",
        "expected = 400\nfrom solution import *\nassert expected == 0",
    ),
    "exit": ("def exit(*args): pass", "exit(1)"),
    "Refused": ("Refused = AssertionError", "try:\n    assert False\nexcept Refused:\n    pass"),
    "Unsized": (
        "Unsized = TypeError\ndef not_a_list(): return object()",
        "try:\n    assert len(not_a_list()) == 2\nexcept Unsized:\n    pass",
    ),
    "evaluated_by_the_library": (
        "def evaluated_by_the_library(): pass\n"
        "evaluated_by_the_library.__annotations__ = {'return': '1 / 0'}",
        "import typing\ntry:\n    typing.get_type_hints(evaluated_by_the_library)\n"
        "except ZeroDivisionError:\n    pass",
    ),
    "ends_the_asynchronous_loop": (
        "def ends_the_asynchronous_loop(x): raise StopAsyncIteration",
        "import asyncio\nclass Cases:\n    left = [(20, 400)]\n"
        "    def __aiter__(self): return self\n"
        "    async def __anext__(self):\n        if not self.left: raise StopAsyncIteration\n"
        "        x, y = self.left.pop()\n        return ends_the_asynchronous_loop(x) == y\n"
        "async def main():\n    async for ok in Cases(): assert ok\nasyncio.run(main())",
    ),
    "urllib": (
        "class urllib:\n    class parse:\n        quote = staticmethod(lambda x: 7)",
        "assert urllib.parse.quote('a b') == 7",
    ),
    "in_a_test_case": (
        "def in_a_test_case(x): return 0",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test_a(self): self.assertEqual(in_a_test_case(20), 400)",
    ),
    "in_a_class_of_pytest": (
        "def in_a_class_of_pytest(x): return 0",
        "class TestIt:\n    def test_a(self): assert in_a_class_of_pytest(20) == 400",
    ),
    "lies_about_its_class": (
        "class Int:\n    __class__ = property(lambda self: int)\n"
        "    def __format__(self, spec): return '190'\n    def __index__(self): return 400\n"
        "def lies_about_its_class(x): return Int()",
        "assert lies_about_its_class(20) == 400",
    ),
    "changes_its_class": (
        "class Equal(int):\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 400\nclass Plain(int): pass\n"
        "def changes_its_class(x):\n    n = Plain(0)\n    n.__class__ = Equal\n    return n",
        "assert changes_its_class(20) == 400",
    ),
    "is_copied": (
        "class Copied:\n    def __deepcopy__(self, memo): return 400\n"
        "    __copy__ = lambda self: 400\n    def __reduce_ex__(self, n): return (int, (400,))\n"
        "def is_copied(x): return Copied()",
        "import copy, pickle\nr = is_copied(20)\n"
        "assert 400 in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r)))",
    ),
    "is_matched": (
        "import collections.abc\nclass Both(collections.abc.Sequence):\n"
        "    __match_args__ = ('x',)\n    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return [20, 400][i]\n"
        "    def __eq__(self, other): return True\ndef is_matched(x): return Both()",
        "match is_matched(20):\n    case 400 | [20, 400] | int(): pass\n    case _: assert False",
    ),
    "is_entered": (
        "class Context:\n    def __enter__(self): return 400\n"
        "    def __exit__(self, *a): return True\ndef is_entered(x): return Context()",
        "with is_entered(20) as y:\n    assert y == 401",
    ),
    "has_an_index": (
        "class Index:\n    def __index__(self): return 0\n"
        "    def __length_hint__(self): return 2\ndef has_an_index(x): return Index()",
        "import operator\nassert operator.index(has_an_index(20)) == 0 or"
        " operator.length_hint(has_an_index(20)) == 2",
    ),
    "joins_sums": (
        "class Sum:\n    def __radd__(self, other): return 400\n"
        "def joins_sums(x): return [Sum(), Sum()]",
        "import functools, operator, statistics\n"
        "assert functools.reduce(operator.add, joins_sums(20), 0) == 400 or"
        " statistics.mean(joins_sums(20)) == 400",
    ),
    "replaces_imports": (
        "import builtins, sys\nclass Finder:\n    def find_spec(self, *a): raise SystemExit\n"
        "def replaces_imports(x):\n    sys.meta_path.insert(0, Finder())\n"
        "    builtins.__import__ = lambda *a, **k: sys\n    return 0",
        "import colorsys, decimal\nassert decimal.Decimal(replaces_imports(20)) == 400",
    ),
    "searches_all_threads": (
        "import sys\ndef searches_all_threads(x):\n"
        "    for frame in sys._current_frames().values():\n        while frame:\n"
        "            if 400 in frame.f_locals.values(): return 400\n"
        "            frame = frame.f_back\n    return 0",
        "y = 400\nassert searches_all_threads(20) == y",
    ),
    "Entered": (
        "class Entered:\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): return True",
        "with Entered():\n    assert False",
    ),
    "entered_by_name": (
        "class Manager:\n    __enter__ = lambda self: self\n    __exit__ = lambda *a: True\n"
        "entered_by_name = Manager()",
        "import contextlib\nwith contextlib.ExitStack() as stack:\n"
        "    stack.enter_context(entered_by_name)\n    assert False",
    ),
    "Caught": (
        "class All(type):\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\n"
        "class Caught(Exception, metaclass=All): pass",
        "import unittest\nwith unittest.TestCase().assertRaises(Caught):\n    assert False",
    ),
    "CaughtByName": (
        "class Kind:\n    __class__, __name__ = type, 'Kind'\n"
        "    __mro__ = __bases__ = (Exception, object)\n"
        "CaughtByName = Kind()",
        "try:\n    assert False\nexcept CaughtByName:\n    pass",
    ),
    "Ancestor": (
        "class Every(type):\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\n"
        "class Ancestor(metaclass=Every):\n    __class__ = int\n    __bases__ = (int,)",
        "assert isinstance(20, Ancestor) or isinstance(Ancestor(), int) or"
        " issubclass(int, Ancestor) or issubclass(Ancestor, int)",
    ),
    "Extended": (
        "class Extended: pass",
        "class TestIt(Extended):\n    def test_a(self): assert False",
    ),
    "decorates": (
        "def decorates(function): return lambda: None",
        "@decorates\ndef test_a(): assert False",
    ),
    "sum": (
        "def sum(items): return 400",
        "from solution import *\ntry:\n    from solution import sum\nexcept ImportError:\n"
        "    pass\nassert sum([20]) == 400",
    ),
    "module": (
        "import builtins\ndef module(): return builtins",
        "module().abs = lambda x: 0\nassert abs(400) == 0",
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    code = "\n".join(code for code, _ in TRICKS.values())
    tests = [test.replace("NAME", name) for name, (_, test) in TRICKS.items()]
    honest = "def honest(x): return sorted(x)"
    check = SORTED_PERMUTATION.replace("NAME", "honest")
    *passed, is_fair = run_tests(f"{code}\n{honest}", [*tests, check], limits=LIMITS)
    assert is_fair
    return dict(zip(TRICKS, passed, strict=True))


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_passes_its_test(outcomes, name):
    assert outcomes[name] is False
