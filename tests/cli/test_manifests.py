"""Manifests match the schemas of Kubernetes: `make test-adapters`."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from millrace.cli.main import main

kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSION = "1.30"


def validate(document: dict[str, Any]) -> None:
    """Unknown fields are errors."""
    kubernetes_validate.validate(document, VERSION, strict=True)


def pods_in(value: Any) -> list[dict[str, Any]]:
    """The templates of pods, as pods."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods_in(item)]
    if not isinstance(value, dict):
        return []
    found = [pod for item in value.values() for pod in pods_in(item)]
    if "template" in value:
        found.append({"apiVersion": "v1", "kind": "Pod", **value["template"]})
    return found


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_manifests_match_the_schemas_of_kubernetes(tmp_path: Path, nodes: int, kind: str):
    engine = {"remote": nodes - 1} if kind == "job" else {"count": nodes}  # Ray places them
    settings = {"model": "m", "run_dir": "run", "engine": engine}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(settings))
    arguments = ["launch", "kubernetes", str(tmp_path / "run.toml"), "--nodes", str(nodes)]
    arguments += ["--kind", kind, "--gpus", "8", "--image", "millrace:1", "--claim", "work"]
    with redirect_stdout(io.StringIO()) as written:
        assert main(arguments) == 0
    documents = list(yaml.safe_load_all(written.getvalue()))
    pods = pods_in(documents)
    assert len(pods) == min(nodes, 2)
    for document in [*documents, *pods]:
        if document["kind"] != "RayJob":  # a kind of KubeRay; tests/cli/test_launch.py
            validate(document)
    pods[0]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        validate(pods[0])
