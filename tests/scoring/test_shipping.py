import importlib
import os
import stat
import subprocess
import sys
import threading

import pytest
import rewards_for_tests

from millrace.core.errors import ConfigError
from millrace.core.plugins import load_reference
from millrace.scoring.functions.user_function import load_function, resolve_function, ship_functions


def make_closure(bonus):
    def with_bonus(completions):
        return [bonus + len(c) for c in completions]

    return with_bonus


class Judge:
    def __init__(self, value):
        self.value = value

    def __call__(self, completions):
        return [self.value for _ in completions]

    def method(self, completions):
        return [-self.value for _ in completions]


def test_importable_functions_travel_as_references(tmp_path):
    functions = {"a": "rewards_for_tests:exact", "b": rewards_for_tests.length}
    locations = ship_functions(functions, folder=tmp_path / "rewards")
    assert locations == {"a": "rewards_for_tests:exact", "b": "rewards_for_tests:length"}
    assert load_function(locations["b"]) is rewards_for_tests.length
    assert not (tmp_path / "rewards").exists()


def test_function_of_a_file_outside_the_path_travels_as_file_reference(tmp_path):
    file = tmp_path / "my_rewards_b.py"
    file.write_text("def exact(completions):\n    return [1.0 for _ in completions]\n")
    function = load_reference(f"{file}:exact")
    assert ship_functions({"a": function}, folder=tmp_path) == {"a": f"{file}:exact"}


def test_rebound_name_is_not_used_as_reference(tmp_path, monkeypatch):
    original = rewards_for_tests.length
    monkeypatch.setattr(rewards_for_tests, "length", lambda completions: [])
    location = ship_functions({"length": original}, folder=tmp_path)["length"]
    assert location.endswith(".pickle")
    assert load_function(location)(["abc"]) == [3]


def test_closures_lambdas_objects_and_methods_travel_as_pickles(tmp_path):
    functions = {
        "closure": make_closure(10),
        "lambda": lambda completions: [7 for _ in completions],
        "object": Judge(2),
        "method": Judge(3).method,
    }
    locations = ship_functions(functions, folder=tmp_path / "rewards")
    results = {name: load_function(path)(["abc"]) for name, path in locations.items()}
    assert results == {"closure": [13], "lambda": [7], "object": [2], "method": [-3]}


def test_pickled_functions_are_private_to_the_user(tmp_path):
    folder = tmp_path / "rewards"
    folder.mkdir(mode=0o777)
    old_mask = os.umask(0)
    try:
        location = ship_functions({"closure": make_closure(1)}, folder=folder)["closure"]
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(location).st_mode) == 0o600  # noqa: PTH116
    os.chmod(location, 0o640)  # noqa: PTH101
    with pytest.raises(ConfigError, match="is not a private file of this user; it is not loaded"):
        load_function(location)


def test_a_function_of_a_script_loads_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        "from millrace.scoring.functions.user_function import ship_functions\n"
        "SCALE = 2.0\n"
        "def scaled(completions):\n"
        "    return [SCALE * len(c) for c in completions]\n"
        "print(ship_functions({'s': scaled}, folder=pathlib.Path(sys.argv[1]))['s'])\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "rewards")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert load_function(done.stdout.strip())(["abc"]) == [6.0]


def test_function_that_cannot_be_pickled_is_a_config_error(tmp_path):
    lock = threading.Lock()

    def guarded(completions):
        with lock:
            return []

    with pytest.raises(
        ConfigError, match=r"'guarded' cannot be sent .*lock.*; define it at the top"
    ):
        ship_functions({"guarded": guarded}, folder=tmp_path)


def test_pickle_with_a_missing_module_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fleeting_module.py").write_text("def inner():\n    return 1.0\n")
    module = importlib.import_module("fleeting_module")
    inner = module.inner
    location = ship_functions({"a": lambda **_: [inner()]}, folder=tmp_path / "rewards")["a"]
    (tmp_path / "fleeting_module.py").unlink()
    monkeypatch.delitem(sys.modules, "fleeting_module")
    importlib.invalidate_caches()
    with pytest.raises(
        ConfigError, match=r"cannot be loaded in a worker process .*fleeting_module"
    ):
        load_function(location)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("rewards_for_tests:exakt", "'rewards_for_tests' has no 'exakt'"),
        ("no_such_module:exact", "No module named 'no_such_module'"),
        ("nowhere/rewards.py:exact", "No file .*nowhere/rewards.py"),
        ("exact", "'exact' is not a reference"),
        ("rewards_for_tests:NOT_A_FUNCTION", "NOT_A_FUNCTION' is 3, not a function; check the"),
        (3, "3 is not a function; give one, or a reference like 'module:name'"),
    ],
)
def test_reference_that_is_not_a_function_is_refused(function, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve_function(function)


def test_import_error_of_a_module_is_shown(tmp_path):
    file = tmp_path / "broken_rewards.py"
    file.write_text("import json\njson.loads('{')\n")
    with pytest.raises(
        ConfigError, match=r"broken_rewards.py:exact' cannot be imported: JSONDecode"
    ):
        resolve_function(f"{file}:exact")
