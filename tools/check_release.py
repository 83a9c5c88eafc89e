"""Build the sdist and the wheel, and check them as a user gets them; see `make release-check`.

It fails if twine refuses the metadata, if a file of the package is missing from the wheel, if the
wheel built from the sdist differs, or if the demo of the installed wheel does not learn. The wheel
is installed into an empty virtual environment, and the demo runs in an empty folder, so nothing of
the checkout is found.
"""

import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "millrace"
MIN_GAIN = 0.3  # of held-out accuracy; the demo gains about 0.8


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="millrace-release-") as folder:
        here = Path(folder)
        # The wheel is built from the sdist, not from the checkout.
        run(sys.executable, "-m", "build", "--outdir", here / "dist", ROOT)
        (wheel,) = (here / "dist").glob("*.whl")
        (sdist,) = (here / "dist").glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        check_files(wheel)
        check_demo(wheel, here)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in (wheel, sdist):
            file.replace(ROOT / "dist" / file.name)
    print(f"dist/ has {wheel.name} and {sdist.name}.")


def check_files(wheel: Path) -> None:
    """Every file that git tracks in the package is in the wheel, and nothing else is."""
    listed = subprocess.check_output(["git", "ls-files", "src/millrace"], cwd=ROOT, text=True)
    wanted = {line.removeprefix("src/") for line in listed.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if wanted != found:
        missing, added = sorted(wanted - found), sorted(found - wanted)
        sys.exit(f"{wheel.name} lacks {missing} and has {added} that git does not track.")


def check_demo(wheel: Path, here: Path) -> None:
    venv.create(here / "venv", with_pip=True)
    python, millrace = here / "venv" / "bin" / "python", here / "venv" / "bin" / "millrace"
    # requirements.txt only chooses among the versions that the wheel allows.
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements.txt", wheel)
    run(python, "-m", "pip", "check")
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    run(millrace, "--version", cwd=elsewhere)
    run(millrace, "init", "project", "--model", "unused", cwd=elsewhere)
    run(millrace, "demo", "--json", "summary.json", cwd=elsewhere)
    summary = json.loads((elsewhere / "summary.json").read_text())
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if after < before + MIN_GAIN:
        sys.exit(f"The demo did not learn: held-out accuracy {before:.3f}, then {after:.3f}.")


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


if __name__ == "__main__":
    main()
