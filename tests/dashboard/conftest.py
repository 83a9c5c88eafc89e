import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "monitoring"))  # synthetic_run.py


@pytest.fixture(scope="session")
def write_run():
    """Writes a run directory with every file that a reader may open; the second step has episodes
    with hostile text."""
    path = TESTS.parent / "benchmarks" / "generated_run.py"
    spec = importlib.util.spec_from_file_location("generated_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_run
