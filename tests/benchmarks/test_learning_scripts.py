"""benchmarks/staleness.py, truncation.py and shaping_speed.py in small sizes."""

import json
import sys
from pathlib import Path

import pytest
import shaping_speed
import staleness
import truncation
from lockstep import QUICK, LockstepSettings, train

from millrace.demo.model import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "0", 0, num_examples=64)
    return folder


def test_batches_have_the_chosen_staleness(models):
    settings = LockstepSettings(loss={}, staleness=2, steps=5, groups_per_step=2, num_held_out=4)
    result = train(models / "0", settings)
    assert [row["staleness"] for row in result.rows] == [0, 1, 2, 2, 2]
    assert result.rows[0]["mismatch/logprob"] < 1e-5
    assert 0 <= result.accuracy <= 1


def test_staleness_script_continues_its_file_and_plots_it(tmp_path, monkeypatch, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["staleness.py", "--quick", "--seeds", "1", "--losses", "naive"]
    arguments += ["--json", str(file), "--plot", str(picture), "--limits"]
    known = {"loss": "naive", "max_staleness": 8, "seed": 0, "accuracy": 0.5}
    file.write_text(json.dumps([known]))
    monkeypatch.setattr(sys, "argv", [*arguments, "8", "1"])
    staleness.main()
    first, second = json.loads(file.read_text())
    assert first == known
    assert (second["max_staleness"], second["staleness_mean"]) == (1, 1.0)
    assert picture.stat().st_size > 1000
    assert "| 8 | 0.500 |" in capsys.readouterr().out


@pytest.mark.parametrize("sampling", truncation.SAMPLINGS)
def test_on_policy_ratios_are_1_only_with_kept_ids(models, sampling):
    settings = LockstepSettings(
        loss=truncation.LOSSES["rejecting"], sampling=truncation.SAMPLINGS[sampling], **QUICK
    )
    kept, lost = (truncation.measure(models / "0", settings, ids=ids) for ids in ("kept", "lost"))
    assert kept["ratio_mean"] == pytest.approx(1, abs=2e-6)
    assert lost["ratio_mean"] < 0.97
    assert kept["masked_share"] == 0
    assert lost["masked_share"] > 0.9


def test_microbatches_of_a_large_step_are_nearly_full():
    groups = shaping_speed.make_groups(512, tokens=256, group_size=16)
    result = shaping_speed.measure(groups, microbatch_tokens=2048)
    assert result["packing_efficiency"] > 0.95
    assert result["tokens"] == pytest.approx(512 * 256, rel=0.1)
