"""The places where data could become code, each with the reason why it is allowed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import millrace

ROOT = Path(millrace.__file__).parent
# Modules that run code while they read data.
UNSAFE_MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "jsonpickle",
}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
# torch's collectives for Python objects pickle them; multiprocessing pickles all it sends.
UNSAFE_ENDINGS = ("_object", "_object_list", "object_list")
UNSAFE_CALLS = {"os.system", "os.popen", "np.load", "numpy.load", "pd.read_pickle", "torch.load"}

ALLOWED = {
    # A function of the user's script or notebook travels to the run's scorer processes in a private
    # file in a private folder; load_function() checks owner and mode before it reads.
    "scoring/functions/user_function.py: import pickle",
    "scoring/functions/user_function.py: import cloudpickle",
    # Only the name of the exception, for torch.load(weights_only=True).
    "training/trainer.py: import pickle",
    # The purpose of the sandbox: both processes are confined before they execute code.
    "scoring/sandbox/candidate.py: exec()",
    "scoring/sandbox/candidate.py: compile()",
    "scoring/sandbox/runner.py: exec()",
    "scoring/sandbox/runner.py: compile()",
    # Not a collective: the reference that ctypes takes to an object of this process.
    "inference/embedded/device_memory.py: ctypes.py_object()",
    # Ranks of one benchmark, which are children of its process.
    "bench/rank_processes.py: import multiprocessing",
    "bench/float64.py: import multiprocessing",
    # "module:name" in the user's own settings: the user asks to run that function.
    "core/plugins.py: import_module(name)",
    # Fixed names.
    "__init__.py: import_module('millrace.scoring.verifiers')",
    "__init__.py: import_module(_HOMES[name])",
    "cli/commands.py: import_module(f'millrace.bench.{args.bench}')",
    "serving/programs/verifiers_env.py: import_module('verifiers.v1')",
    "cluster/launchers/ray_cluster.py: import_module('ray')",
    "monitoring/trackers.py: import_module(self.package)",
    "run/execution/execute.py: import_module('pandas')",
    "scoring/verifiers/reasoning_gym.py: import_module(f'reasoning_gym.{module}'.rstrip('.'))",
    "scoring/sandbox/runner.py: import_module('_strptime')",
    # Modules that the controller names over the private pipe of its own child process.
    "cluster/fork_server.py: import_module(module)",
    # Imported for a test in the sandbox, in the confined process.
    "scoring/sandbox/runner.py: import_module(name)",
    "scoring/sandbox/runner.py: import_module(f'{name}.{part}')",
}


def findings_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
                yield from (f"import {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES)
                yield from (f"import {n}" for n in names if n.startswith("multiprocessing"))
            case ast.ImportFrom(module=str() as name):
                if name.split(".")[0] in {*UNSAFE_MODULES, "multiprocessing"}:
                    yield f"import {name}"
            case ast.Call():
                yield from _calls(node)
            case ast.arguments():
                yield from _defaults(node)
            case ast.AnnAssign(target=ast.Name(id="trust_remote_code"), value=ast.Constant(True)):
                yield "trust_remote_code = True"


def _calls(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    is_weights_only = _is_true(keywords.get("weights_only"))
    if name in UNSAFE_BUILTINS or (name in UNSAFE_CALLS and not is_weights_only):
        yield f"{name}()"
    if name.endswith(UNSAFE_ENDINGS) and "." in name:
        yield f"{name}()"
    if name.endswith("import_module"):
        yield f"import_module({ast.unparse(call.args[0])})"
    for keyword in ("trust_remote_code", "allow_pickle", "shell"):
        if _is_true(keywords.get(keyword)):
            yield f"{keyword} = True"


def _defaults(arguments: ast.arguments) -> Iterator[str]:
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in named:
        if argument.arg == "trust_remote_code" and _is_true(default):
            yield "trust_remote_code = True"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_data_becomes_code_only_in_allowed_places():
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {finding}"
        for path in ROOT.rglob("*.py")
        for finding in findings_in(path.read_text())
    }
    assert found - ALLOWED == set(), "new: avoid it, or add it to ALLOWED with the reason"
    assert ALLOWED - found == set(), "gone: remove it from ALLOWED"


def test_scan_finds_every_dangerous_call():
    source = """
import pickle, yaml.loader
from multiprocessing.connection import Client
torch.load(path)
torch.load(path, weights_only=True)
np.load(path, allow_pickle=True)
eval(text)
re.compile(text)
dist.broadcast_object_list(values)
AutoModel.from_pretrained(path, trust_remote_code=True)
AutoModel.from_pretrained(path, trust_remote_code=asked)
subprocess.run(text, shell=True)
def load(path, *, trust_remote_code=True): ...
class Settings:
    trust_remote_code: bool = True
"""
    assert sorted(findings_in(source)) == [
        "allow_pickle = True",
        "dist.broadcast_object_list()",
        "eval()",
        "import multiprocessing.connection",
        "import pickle",
        "import yaml.loader",
        "np.load()",
        "shell = True",
        "torch.load()",
        "trust_remote_code = True",
        "trust_remote_code = True",
        "trust_remote_code = True",
    ]
