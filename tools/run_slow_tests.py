"""Run the slow tests, and those that fail once more: `python tools/run_slow_tests.py`.

A slow test may fail because the machine is busy, so it gets a second try, alone. A test that passes
only then is reported as flaky. A test that fails twice fails the run.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> tuple[int, list[str]]:
    """Run pytest; return its exit code and the ids of the tests that failed."""
    options = ("-rfE", "--timeout", "300", "--durations", "40", "--durations-min", "10")
    command = [sys.executable, "-m", "pytest", "-m", "slow", *options, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    failed = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := re.match(r"(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", line.rstrip()):
            failed.append(found.group(1))
    return process.wait(), failed


def main() -> int:
    # Three files at a time, because many tests wait for processes that they started.
    code, failed = run("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--fork-workers")
    if code == 0 or not failed:
        return code
    print(f"\n{len(failed)} tests failed; running them again, one at a time.\n", flush=True)
    code, _ = run(*failed)
    if code == 0:
        print("\nFlaky: these tests failed first and passed alone:")
        print("\n".join(f"  {name}" for name in failed))
    return code


if __name__ == "__main__":
    sys.exit(main())
