from pathlib import Path

import pytest
from engine_rig import save_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tied head."""
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path
