"""How evenly experts are used, and the loss that balances them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from architectures import MIXTURE, NUM_EXPERTS, TOP_K, tiny_model
from batches import batch_of, random_rollout, sharing_rollouts, trainer_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from millrace.config import RunConfig
from millrace.core.completions import unknown_id
from millrace.core.errors import ConfigError
from millrace.core.microbatch import Batch
from millrace.core.records import Rollout
from millrace.inference.embedded.live_weights import LiveWeights
from millrace.models.routing import (
    RouteReplay,
    check_aux_loss,
    check_bias_update,
    find_routing,
    router_biases,
)
from millrace.training.layers import compile_layers
from millrace.training.metrics import summarize
from millrace.training.trainer import Trainer


def routed(rollouts: list[Rollout], *, num_layers: int = 2, unbalanced: bool = False):
    """The same rollouts, with random routes; a token has the same ones wherever it occurs."""
    high = 3 if unbalanced else NUM_EXPERTS
    table = np.random.default_rng(2).random((64, num_layers, high)).argsort(-1)[..., :TOP_K]
    return [dataclasses.replace(r, routes=table[r.tokens % 64].astype(np.uint8)) for r in rollouts]


def replaying(model, **settings) -> Trainer:
    routing = find_routing(model)
    assert routing is not None
    return trainer_of(model, replay=RouteReplay(routing), **settings)


def sharing_batch(**packing) -> Batch:
    return batch_of(routed(sharing_rollouts(np.random.default_rng(1))), **packing)


def trained_routes(batch: Batch) -> np.ndarray:  # [N, layers, K]
    return np.concatenate([part.routes[part.predictors] for part in batch.microbatches])


def test_load_metrics_count_the_experts_of_trained_tokens():
    batch = sharing_batch()
    metrics = replaying(tiny_model(MIXTURE)).step(batch)
    routes = trained_routes(batch)
    loads = [np.bincount(routes[:, i].ravel(), minlength=NUM_EXPERTS) for i in range(2)]
    shares = [load / load.sum() for load in loads]
    largest = np.mean([share.max() * NUM_EXPERTS for share in shares])
    entropies = [-sum(s * math.log(s) for s in share if s) for share in shares]
    assert metrics["moe/load_max"] == pytest.approx(largest)
    assert metrics["moe/load_entropy"] == pytest.approx(np.mean(entropies) / math.log(NUM_EXPERTS))
    assert "moe/aux_loss" not in metrics
    few = batch_of(routed([random_rollout(np.random.default_rng(0))], unbalanced=True))
    assert replaying(tiny_model(MIXTURE)).step(few)["moe/load_max"] >= NUM_EXPERTS / 3


def test_a_dense_model_has_no_load():
    names = trainer_of(tiny_model("qwen3")).step(
        batch_of(sharing_rollouts(np.random.default_rng(1)))
    )
    assert not any(name.startswith("moe/") for name in names)


def aux_gradients(batch: Batch, **settings):
    """The gradient of the auxiliary loss alone: of all advantages 0."""
    parts = [
        dataclasses.replace(p, advantages=np.zeros_like(p.advantages)) for p in batch.microbatches
    ]
    batch = dataclasses.replace(batch, microbatches=tuple(parts))
    trainer = replaying(tiny_model(MIXTURE), router_aux_loss=0.5, **settings)
    trainer.policy.set_batch_load(batch)
    loss, metrics = trainer.accumulate(batch)
    named = trainer.policy.module.named_parameters()
    gradients = {n: p.grad for n, p in named if p.grad is not None and p.grad.abs().sum() > 0}
    return loss.item(), gradients, summarize([metrics.on_host()])["moe/aux_loss"]


def test_aux_loss_of_one_layer_is_that_of_transformers():
    """Of the routers' own choice, which transformers assumes, at the rows of trained tokens."""
    model = tiny_model(MIXTURE, num_layers=1)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[0].mlp.gate.register_forward_hook(lambda *args: seen.append(args[2]))
    rollouts = sharing_rollouts(np.random.default_rng(1))
    batch = batch_of(rollouts)
    (part,) = batch.microbatches
    replaying(model).policy.logprobs(part)
    hook.remove()
    logits, _, chosen = seen[-1]
    rows = torch.from_numpy(part.predictors).long()
    expected = load_balancing_loss_func((logits[rows],), NUM_EXPERTS, TOP_K)
    routes = chosen.numpy().astype(np.uint8)[:, None]
    part = dataclasses.replace(part, routes=routes)
    batch = dataclasses.replace(batch, microbatches=(part,))
    trainer = replaying(tiny_model(MIXTURE, num_layers=1), router_aux_loss=1.0)
    assert trainer.step(batch)["moe/aux_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["", "recomputed"])
def test_aux_loss_does_not_depend_on_microbatches(settings):
    whole, small = sharing_batch(), sharing_batch(microbatch_tokens=14)
    assert len(small.microbatches) > 2
    loss, expected, aux = aux_gradients(whole)
    split_loss, gradients, split_aux = aux_gradients(small, **settings)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    assert split_aux == pytest.approx(aux, rel=1e-5)
    assert loss == pytest.approx(0.5 * aux, rel=1e-5)
    assert gradients.keys() == expected.keys()
    assert any(name.endswith("mlp.gate.weight") for name in gradients)
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        assert (gradients[name] - gradient).abs().max() / largest < 1e-5, name


@pytest.mark.slow
def test_compiled_layers_have_the_same_aux_loss():
    batch = sharing_batch()
    expected = replaying(tiny_model(MIXTURE), router_aux_loss=0.5).step(batch)
    trainer = replaying(tiny_model(MIXTURE), router_aux_loss=0.5)
    compile_layers(trainer.policy.module, backend="aot_eager")
    metrics = trainer.step(batch)
    for name in ("loss", "grad_norm", "moe/aux_loss", "moe/load_max"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
    torch._dynamo.reset()


def test_unknown_routes_do_not_count():
    (part,) = sharing_batch().microbatches
    routes = part.routes.copy()
    routes[:] = unknown_id(routes.dtype)
    batch = dataclasses.replace(
        sharing_batch(), microbatches=(dataclasses.replace(part, routes=routes),)
    )
    metrics = replaying(tiny_model(MIXTURE), router_aux_loss=1.0).step(batch)
    assert metrics["moe/aux_loss"] == 0
    assert metrics["moe/load_max"] > 1


def test_biases_of_routers_move_against_the_load():
    model = tiny_model("glm4_moe")  # its first layer has no experts
    batch = batch_of(routed(sharing_rollouts(np.random.default_rng(1)), num_layers=1))
    load = np.bincount(trained_routes(batch).ravel(), minlength=NUM_EXPERTS)
    assert load.min() < load.mean() < load.max()
    trainer = replaying(model, router_bias_rate=0.25, epochs=2)
    trainer.step(batch)
    ((name, bias),) = router_biases(model).items()
    assert bias.tolist() == (0.25 * np.sign(load.mean() - load)).tolist()
    engine = tiny_model("glm4_moe").requires_grad_(False)
    live = LiveWeights(engine, version=0, merger=None, bank=None)
    live.commit(live.prepare(trainer.policy.weights(), version=1))
    assert torch.equal(router_biases(engine)[name], bias)
    assert name in model.state_dict()  # checkpoints have it
    bias.zero_()
    part = batch.microbatches[0]
    part = dataclasses.replace(part, advantages=np.full_like(part.advantages, np.nan))
    trainer.step(dataclasses.replace(batch, microbatches=(part, *batch.microbatches[1:])))
    assert trainer.skipped
    assert not bias.any()


def test_a_bias_update_of_routers_without_bias_is_refused():
    check_bias_update(tiny_model("glm4_moe"), replay_of("glm4_moe"))
    with pytest.raises(ConfigError, match="those of Qwen3MoeForCausalLM have none; set it to 0"):
        check_bias_update(tiny_model(MIXTURE), replay_of(MIXTURE))
    with pytest.raises(ConfigError, match=r"needs a mixture of experts and trainer\.replay_routes"):
        check_bias_update(tiny_model("qwen3"), None)


def replay_of(architecture: str) -> RouteReplay:
    routing = find_routing(tiny_model(architecture))
    assert routing is not None
    return RouteReplay(routing)


def test_an_aux_loss_that_is_not_defined_is_refused():
    assert RunConfig.model_fields["trainer"].annotation().router_aux_loss == 0
    with pytest.raises(ConfigError, match=r"needs a mixture of experts and trainer\.replay_routes"):
        check_aux_loss(None)
    for architecture in (MIXTURE, "mixtral", "qwen2_moe"):
        check_aux_loss(replay_of(architecture))
    with pytest.raises(ConfigError, match="needs routers that choose by softmax probabilities"):
        check_aux_loss(replay_of("glm4_moe"))  # sigmoid scores
