"""The search of benchmarks/largest_model.py, and the models that it writes."""

import argparse
from pathlib import Path

import largest_model
import pytest
from largest_model import Models, Search, attempt, errors

from millrace.bench.workloads import shape_named
from millrace.models.directory import num_weights


@pytest.mark.parametrize("limit", [1, 9, 20, 21, 33])
def test_the_search_ends_at_the_largest_number_of_layers_that_trains(limit: int):
    search = Search("sleep", first=20)
    tried = []
    while (layers := search.next_layers) is not None:
        tried.append(layers)
        if layers <= limit:
            search.trained = layers
        else:
            search.failed = layers
    assert len(set(tried)) == len(tried)
    assert search.failed == limit + 1 if limit > 1 else search.failed == 2
    assert search.trained == (limit if limit > 1 else None)


@pytest.mark.parametrize("is_tied", [True, False])
def test_models_of_several_sizes_share_the_files_of_their_layers(is_tied: bool, tmp_path: Path):
    shape = shape_named("tiny")
    shape.tie_word_embeddings = is_tied
    models = Models(shape, tmp_path)
    for layers in (3, 2):
        folder = models.write(layers)
        assert num_weights(str(folder)) == models.num_parameters(layers)
    first = (tmp_path / f"model-{layers}" / "layer-1.safetensors" for layers in (2, 3))
    assert len({file.stat().st_ino for file in first}) == 1


def test_the_first_sizes_are_what_should_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(largest_model, "total_gpu_bytes", lambda: 140 * 2**30)
    models = Models(shape_named("tiny"), tmp_path)
    layers = models.estimate("sleep", kv_gib=12)
    room = 130 * 2**30 / 16
    assert models.num_parameters(layers) <= room < models.num_parameters(layers + 1)
    assert 0.5 < models.estimate("take_turns", kv_gib=12) / layers < 0.6


def test_the_error_of_each_process_is_quoted_whole(tmp_path: Path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "train.log").write_text("Version 1\nmillrace: it failed.\n\n")
    (logs / "engine-0.log").write_text("Traceback (most recent call last):\n" + "memory " * 200)
    (logs / "trainer.log").write_text("all is well\n")
    assert errors(tmp_path) == {"train": "millrace: it failed.", "engine-0": "memory " * 200}


@pytest.mark.slow
def test_an_attempt_is_a_run_of_its_own_whose_steps_and_errors_are_seen(tmp_path: Path):
    models = Models(shape_named("tiny"), tmp_path)
    search, wrong = Search("sleep", first=2), Search("take_turns", first=1)
    sizes = {"kv_gib": 0.01, "max_new_tokens": 4}
    attempt(search, models, argparse.Namespace(max_context=64, **sizes), limit_s=100)
    assert (search.trained, search.failed, search.is_over) == (2, None, False)
    attempt(wrong, models, argparse.Namespace(max_context=2, **sizes), limit_s=100)
    assert (wrong.trained, wrong.failed, wrong.is_over) == (None, None, True)
