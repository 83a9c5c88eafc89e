import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, sharing_rollouts, trainer_of
from torch._dynamo.utils import counters

from millrace.core.errors import ConfigError
from millrace.training.layers import checkpoint_layers, compile_layers, decoder_layers


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batches():
    rng = np.random.default_rng(2)
    rollouts = [mixed_rollouts(rng, 5), sharing_rollouts(rng), mixed_rollouts(rng, 3)]
    return [batch_of(part) for part in rollouts]


@pytest.mark.parametrize(
    ("architecture", "checkpointing"),
    [
        ("qwen3", False),
        ("gemma2", True),
        pytest.param("qwen3", True, marks=pytest.mark.slow),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_give_the_same_steps(architecture, checkpointing):
    compiled, plain = trainer_of(tiny_model(architecture)), trainer_of(tiny_model(architecture))
    compile_layers(compiled.model, backend="aot_eager")
    if checkpointing:
        checkpoint_layers(compiled.model)
    for batch in batches():
        ours, theirs = compiled.step(batch), plain.step(batch)
        for name in ("loss", "entropy", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_all_layers_and_all_sizes_share_their_compiled_code():
    trainer = trainer_of(tiny_model("qwen3"))
    assert len(decoder_layers(trainer.model)) == 2
    compile_layers(trainer.model, backend="aot_eager")
    first, *others = batches()
    trainer.step(first)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    for batch in others:
        trainer.step(batch)
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_a_missing_compiler_is_said_before_the_first_step(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"trainer\.compile = true needs a C\+\+ compiler"):
        trainer_of(tiny_model("llama"), compile_layers=True)
