import pytest

from millrace.cli.main import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "there is no API key; set MILLRACE_API_KEY or --api-key-file"),
        (["--host", "no.such.host.invalid"], "is not an address of this machine"),
        (["--trainer.steps", "3"], "--trainer.steps is not a setting of a server"),
        (["--engine.count", "3"], "--engines"),
        (["--engines", "0"], "start no process"),
        (["--engine.max_seqs", "3"], "Unknown setting 'engine.max_seqs'"),
        (["--engine.dtype"], "--engine.dtype needs a value"),
        (
            ["--engines", "2", "--engine.type=vllm", "--engine.options.attach=['http://a']"],
            "engine.options.attach has 1 servers, and the run has 2 engines",
        ),
        (["--api-key-file", "nowhere.txt"], "cannot be read"),
        (["--api-key-file", "empty.txt"], "is empty"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    options, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLRACE_API_KEY", raising=False)
    (tmp_path / "empty.txt").write_text("\n")
    assert main(["serve", "model", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
