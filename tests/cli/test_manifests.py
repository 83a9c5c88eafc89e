"""Manifests match the schemas of Kubernetes: `make test-adapters`."""

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jsonschema
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


def launched(folder: Path, *, nodes: int, kind: str) -> list[dict[str, Any]]:
    engine = {"remote": nodes - 1} if kind == "job" else {"count": nodes}  # Ray places them
    settings = {"model": "m", "run_dir": "run", "engine": engine}
    settings["environment"] = {"remote": 2 * (nodes - 1)}
    (folder / "run.toml").write_text(tomli_w.dumps(settings))
    arguments = ["launch", "kubernetes", str(folder / "run.toml"), "--nodes", str(nodes)]
    arguments += ["--kind", kind, "--gpus", "8", "--image", "millrace:1", "--claim", "work"]
    with redirect_stdout(io.StringIO()) as written:
        assert main(arguments) == 0
    return list(yaml.safe_load_all(written.getvalue()))


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_manifests_match_the_schemas_of_kubernetes(tmp_path: Path, nodes: int, kind: str):
    documents = launched(tmp_path, nodes=nodes, kind=kind)
    pods = pods_in(documents)
    assert len(pods) == (1 if nodes == 1 else 3 if kind == "job" else 2)
    for document in [*documents, *pods]:
        if document["kind"] != "RayJob":  # a kind of KubeRay; below, and tests/cli/test_launch.py
            validate(document)
    pods[0]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        validate(pods[0])


def strict(schema: Any) -> Any:
    """Unknown fields are errors, as in `kubectl apply --validate=strict`."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="needs the schema of KubeRay")
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_rayjob_matches_the_schema_of_kuberay(tmp_path: Path, nodes: int):
    """KUBERAY_CRD: path of ray-operator/config/crd/bases/ray.io_rayjobs.yaml of its repository."""
    definition = yaml.load(Path(os.environ["KUBERAY_CRD"]).read_text(), Loader=yaml.CSafeLoader)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"required": ["name"]}  # of Kubernetes itself
    (job,) = launched(tmp_path, nodes=nodes, kind="rayjob")
    jsonschema.validate(job, schema)
    job["spec"]["entryPoint"] = job["spec"].pop("entrypoint")
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        jsonschema.validate(job, schema)
