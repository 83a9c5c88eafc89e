"""In 16 bits, engine and trainer round at the same places: matrix products and attention.

The trainer's own rounding error, its difference from float32, is the measure of what is left.
"""

from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, mixed_rollouts, trainer_of
from engine_rig import cast, make_engine

from millrace.bench.fidelity import generate
from millrace.core.microbatch import Batch
from millrace.models.routing import RouteReplay, find_routing
from millrace.training.packing.packer import pack


def trained_model(architecture: str, dtype: torch.dtype = torch.bfloat16):
    """A float32 model whose weights 16 bits hold exactly."""
    return cast(cast(tiny_model(architecture), dtype), torch.float32)


def logprobs_of(model: Any, batch: Batch, dtype: torch.dtype, *, replays: bool) -> np.ndarray:
    routing = find_routing(model) if replays else None
    replay = None if routing is None else RouteReplay(routing)
    policy = trainer_of(model, compute_dtype=dtype, replay=replay).policy
    with torch.no_grad():
        return policy.logprobs(batch.microbatches[0]).logprobs.numpy()


def mismatch(architecture: str, *, replays: bool = False) -> tuple[float, float]:
    """The mean difference of the logprobs of engine and trainer in bfloat16, and the trainer's from
    those in float32."""
    engine = make_engine(architecture, dtype=torch.bfloat16, eos_ids=(), records_routes=replays)
    groups = generate(engine, 0, num_prompts=8, new_tokens=40, num_tokens=60)
    batch = pack(groups, microbatch_tokens=10**6)
    ours, exact = (
        logprobs_of(trained_model(architecture), batch, dtype, replays=replays)
        for dtype in (torch.bfloat16, torch.float32)
    )
    recorded = batch.microbatches[0].engine_logprobs
    return float(np.abs(ours - recorded).mean()), float(np.abs(ours - exact).mean())


@pytest.mark.parametrize(
    ("architecture", "share"), [("lfm2", 0.5), ("gpt_oss", 1.0), ("gpt2", 0.5)]
)
def test_single_steps_sum_outputs_of_layers_in_float32(architecture: str, share: float):
    """As the decode loop and the trainer do. In bfloat16, these shares were 0.9, 1.5 and 1.5."""
    apart, own_error = mismatch(architecture)
    assert apart < share * own_error


@pytest.mark.parametrize(
    ("architecture", "replays", "share"), [("phimoe", True, 0.37), ("glm4_moe", False, 0.4)]
)
def test_routers_of_engine_and_trainer_compute_the_same_scores(architecture, replays, share):
    """Under autocast, the shares were 0.48 and 0.60. They are 0.26 and 0.17 on one CPU; others may
    round in another order."""
    apart, own_error = mismatch(architecture, replays=replays)
    assert apart < share * own_error


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_gradients_of_routers_are_not_rounded_to_16_bits(checkpointing: bool):
    batch = batch_of(mixed_rollouts(np.random.default_rng(0)))
    gradients: list[torch.Tensor] = []
    for dtype in (torch.bfloat16, torch.float32):
        model = trained_model("mixtral")
        trainer = trainer_of(model, compute_dtype=dtype, gradient_checkpointing=checkpointing)
        trainer.policy.logprobs(batch.microbatches[0]).logprobs.sum().backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad)
    ours, exact = gradients
    assert ours.dtype == torch.float32
    assert (ours != ours.bfloat16()).any()
    assert torch.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.95
