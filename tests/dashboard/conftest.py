import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def write_run():
    """Writes a run directory with every file that a reader may open; the second step has episodes
    with hostile text."""
    path = REPOSITORY / "benchmarks" / "generated_run.py"
    spec = importlib.util.spec_from_file_location("generated_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_run
