"""All scripts of benchmarks/ start. Other files of this folder run some of them in small sizes."""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NOT_INSTALLED = ("playwright", "trl", "vllm")
WITHOUT_OPTIONS = ("controller_costs",)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_starts_and_describes_its_options(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    is_command = "__main__" in path.read_text() and path.stem not in WITHOUT_OPTIONS
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    monkeypatch.setattr("sys.path", [str(BENCHMARKS), *sys.path])
    with contextlib.suppress(SystemExit):
        try:
            runpy.run_path(str(path), run_name="__main__" if is_command else path.stem)
        except ModuleNotFoundError as error:
            if error.name not in NOT_INSTALLED:
                raise
            pytest.skip(f"needs {error.name}")
    assert ("usage:" in capsys.readouterr().out) == is_command
