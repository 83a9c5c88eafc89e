"""mr.train in a real Jupyter kernel. Needs nbclient, ipykernel and pandas: `make test-adapters`."""

import pytest
from project import make_project

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")

TRAIN = """
import millrace as mr

result = mr.train("run.toml", trainer={"steps": 3})
"""
FRAME = """
frame = result.to_pandas()
print(list(frame.index), frame["reward/mean"].notna().all(), len(frame.columns) > 20)
"""


def text_of(output) -> str:
    """Of a stream, or of what rich displays in a notebook."""
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


@pytest.mark.timeout(400)
def test_train_runs_in_a_notebook_with_progress_and_a_data_frame(tmp_path, monkeypatch):
    project = make_project(tmp_path)
    monkeypatch.chdir(project)
    cells = [nbformat.v4.new_code_cell(source) for source in (TRAIN, FRAME)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(project)}}

    nbclient.NotebookClient(notebook, timeout=350, resources=resources).execute()  # raises errors

    progress, frame = ("".join(map(text_of, cell.outputs)) for cell in cells)
    assert "event loop is already running" not in progress
    assert "run: ready" in progress
    assert "step 3/3" in progress, progress
    assert frame == "[1, 2, 3] True True\n"
