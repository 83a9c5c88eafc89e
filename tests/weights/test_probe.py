"""The swap probe: what the trainer computes, and what an engine does with it."""

import dataclasses
import math
import queue
import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from architectures import MIXTURE, tiny_model
from engine_rig import make_engine
from queue_link import FakeLink, in_thread

from millrace.cluster.messages import Stop, Swapped, SwapWeights
from millrace.core.errors import ConfigError, EngineLost
from millrace.core.records import SwapProbe, TensorSpec, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.worker import EngineWorker
from millrace.models.attention.packed import PACKED
from millrace.models.routing import policy_tensors, router_biases
from millrace.weights.probe import ProbeReference, check_probe
from millrace.weights.publisher import Publisher
from millrace.weights.transport import make_receiver, make_sender


def published(architecture: str = "qwen3") -> WeightUpdate:
    """Other weights than those of the model that the reference was made of."""
    first = tiny_model(architecture)
    for bias in router_biases(first).values():
        bias += torch.arange(len(bias))
    reference = ProbeReference(first)
    sender = make_sender("shm", dtype=torch.float32, reference=reference)
    update = sender.publish(1, policy_tensors(tiny_model(architecture, seed=1)))
    sender.close()
    return update


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", MIXTURE, "glm4_moe"])
def test_update_carries_the_logprobs_of_its_weights(architecture: str):
    probe = published(architecture).probe
    assert probe is not None
    tokens = torch.tensor([probe.tokens])
    with torch.no_grad():
        logprobs = tiny_model(architecture, seed=1)(tokens).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
    np.testing.assert_allclose(probe.logprobs, expected, rtol=0, atol=1e-5)


def test_reference_leaves_the_attention_of_the_trainer_as_it_is():
    model = tiny_model("qwen3")
    model.set_attn_implementation(PACKED.name)
    ProbeReference(model)
    assert model.config._attn_implementation == PACKED.name


def test_no_step_waits_for_the_reference():
    is_computing, may_compute = threading.Event(), threading.Event()
    weights = policy_tensors(tiny_model("qwen3"))
    real, ready = ProbeReference(tiny_model("qwen3")), queue.Queue[WeightUpdate]()

    def reference(weights: Mapping[str, torch.Tensor]) -> SwapProbe:
        is_computing.set()
        assert may_compute.wait(30)
        return real(weights)

    sender = make_sender("shm", dtype=torch.float32, reference=reference)
    publisher = Publisher(sender, emit=ready.put)
    publisher.publish(1, weights)
    assert is_computing.wait(30)
    publisher.publish(2, weights)  # what the next step does, while the reference is computed
    assert ready.empty()
    may_compute.set()
    updates = [ready.get(timeout=30) for _ in range(2)]
    assert [update.version for update in updates] == [1, 2]
    assert updates[0].probe == updates[1].probe == real(weights)
    publisher.close()


@pytest.mark.parametrize(
    ("dtype", "error", "is_found"),
    [
        ("float32", 0.0, False),
        ("float32", 0.01, True),
        ("float32", math.nan, True),
        ("float16", 0.01, False),
        ("float16", 0.1, True),
        ("bfloat16", 0.1, False),
        ("bfloat16", 0.3, True),
        ("float8", 0.9, False),
        ("float8", 1.1, True),
    ],
)
def test_difference_beyond_the_tolerance_of_its_dtype_is_found(
    dtype: str, error: float, is_found: bool
):
    tensors = (TensorSpec(name="w", dtype=dtype, shape=(), offset=0),)
    probe = SwapProbe(tokens=(1, 2, 3), logprobs=(-1.0, -2.0))
    update = dataclasses.replace(published(), tensors=tensors, probe=probe)
    logprobs = np.array([-1.0, -2.0]) + error
    if not is_found:
        check_probe(update, logprobs)
        return
    both = f"{logprobs.mean():.4f} in this engine and -1.5000 in the trainer"
    with pytest.raises(EngineLost, match=both):
        check_probe(update, logprobs)


def test_engine_process_ends_at_a_swap_that_fails_the_probe():
    sender = make_sender("shm", dtype=torch.float32, reference=ProbeReference(tiny_model("qwen3")))
    right = sender.publish(1, dict(tiny_model("qwen3", seed=1).named_parameters()))
    wrong = sender.publish(2, dict(tiny_model("qwen3", seed=2).named_parameters()))
    wrong = dataclasses.replace(wrong, probe=right.probe)
    link = FakeLink()
    worker = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=make_engine(),
        receiver=make_receiver("shm"),
        timeline=Timeline("engine-0"),
    )

    def serve() -> None:
        with pytest.raises(EngineLost, match="After the swap to version 2"):
            worker.serve()

    with in_thread(serve):
        reply = link.call(SwapWeights(update=right)).result()
        assert isinstance(reply, Swapped)
        link.call(SwapWeights(update=wrong))
    sender.close()


@pytest.mark.parametrize("is_right", [True, False])
def test_weights_that_an_engine_has_loaded_itself_are_probed_before_it_serves(is_right: bool):
    sender = make_sender("shm", dtype=torch.float32, reference=ProbeReference(tiny_model("qwen3")))
    first = sender.publish(
        0, dict(tiny_model("qwen3", seed=0 if is_right else 1).named_parameters())
    )
    engine, link = make_engine(), FakeLink()
    assert engine.version == first.version
    worker = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=engine,
        receiver=make_receiver("shm"),
        timeline=Timeline("engine-0"),
    )
    with in_thread(worker.serve):
        answer = link.call(SwapWeights(update=first))
        if is_right:
            assert isinstance(answer.result(), Swapped)
        else:
            with pytest.raises(
                ConfigError,
                match=r"engine-0: At the start, with version 0, .*; if its server is one of",
            ):
                answer.result()
        link.call(Stop()).result()
    sender.close()
