"""Commands and settings in the documents exist."""

import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace.config import load_config, parse_overrides

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/**/*.md")])
FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*(?:\.\w+)*)(?:[= ]([^\s`]+))?")


def code_of(text: str) -> list[str]:
    """Lines of code blocks without their comments, and code in backticks, joined over lines."""
    blocks = re.findall(r"```(?:console)?\n(.*?)```", text, re.S)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    return [*lines, *(code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose))]


def commands_in(text: str, program: str) -> list[str]:
    """The rest of each command line that starts with `program`."""
    pattern = re.compile(rf"(?:^|&& |\$ ){program}(\S.*)")
    return [found[1] for code in code_of(text) if (found := pattern.search(code))]


@cache
def help_of(*command: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main([*command, "--help"])
    return output.getvalue()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_of_millrace_exist(document):
    for command in commands_in(document.read_text(), "millrace "):
        if command.startswith(("--", "COMMAND")):
            continue
        name = re.match(r"bench [a-z]+|[a-z-]+", command)
        assert name, command
        text = help_of(*name[0].split())
        assert text.startswith("usage:"), command
        for flag, value in FLAG.findall(command.partition(" -- ")[0]):
            if f"--{flag}" in text:
                continue
            assert name[0] in ("train", "serve", "launch"), command
            load_config({"model": "m"}, overrides=parse_overrides({flag: value}))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_options_of_scripts_exist(document):
    for command in commands_in(document.read_text(), "python (?=benchmarks|examples)"):
        script = ROOT / command.split()[0]
        source = script.read_text()
        if "chain_runs" in source:
            source += (ROOT / "benchmarks" / "chain_runs.py").read_text() + '"--runs" "--rewards"'
        for flag, _ in FLAG.findall(command):
            assert f'"--{flag}"' in source, command


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        for command in commands_in(document.read_text(), "make "):
            assert command.split()[0] in targets, (document.name, command)
