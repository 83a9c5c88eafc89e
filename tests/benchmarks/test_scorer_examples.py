"""examples/scorers: five runs that differ only in their [[scorers]]."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import millrace as mr
from millrace.config import load_config
from millrace.monitoring.files.metrics import read_metrics

FOLDER = Path(__file__).parents[2] / "examples" / "scorers"
KINDS = ("function", "process_reward_model", "reward_model", "self_teacher", "teacher")


def test_runs_differ_only_in_scorers_and_run_dir():
    assert sorted(path.stem for path in FOLDER.glob("*.toml")) == list(KINDS)
    settings, scorers = [], set()
    for kind in KINDS:
        plain = load_config(FOLDER / f"{kind}.toml").model_dump(mode="json")
        (scorer,) = plain.pop("scorers")
        scorers.add(json.dumps(scorer))
        assert Path(plain.pop("run_dir")).name == kind
        settings.append(plain)
    assert all(other == settings[0] for other in settings)
    assert len(scorers) == len(KINDS)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the folder, with models that were hardly trained."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(FOLDER, root / "examples" / "scorers")
    spec = importlib.util.spec_from_file_location("make_models", FOLDER / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_all(root / "runs" / "scorers", num_examples=192)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_example_trains(project, kind):
    config = load_config(project / "examples" / "scorers" / f"{kind}.toml")
    plain = {**config.model_dump(mode="json"), "monitoring": {"progress": "off"}}
    plain["trainer"] = {**plain["trainer"], "steps": 2, "groups_per_step": 2}
    result = mr.train(plain)
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1][f"scorer/{kind if kind != 'function' else 'outcome'}/episodes"] > 0
