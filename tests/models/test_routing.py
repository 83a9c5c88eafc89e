"""Routers are found by what they compute, and they follow routing rules."""

import numpy as np
import pytest
import torch
import transformers
from architectures import MIXTURES, NUM_EXPERTS, TOP_K, VOCAB, tiny_model
from torch import Tensor, nn

from millrace.core.completions import unknown_routes
from millrace.core.errors import ConfigError
from millrace.models.routing import RouteReplay, Routing, check_replay, find_routing

TOKENS = torch.arange(3, 23)
CPU = torch.device("cpu")


class RecordedChoice:
    def __init__(self) -> None:
        self.chosen: list[Tensor] = []

    def choose(self, own: Tensor, *, scores: Tensor) -> Tensor:
        self.chosen.append(own)
        return own


def recorded_routes(model, routing: Routing) -> np.ndarray:  # [T, layers, top_k]
    rules = [RecordedChoice() for _ in routing.routers]
    routing.install(rules)
    with torch.no_grad():
        model(TOKENS[None])
    return torch.stack([rule.chosen[-1] for rule in rules], 1).numpy().astype(routing.dtype)


def routing_of(model) -> Routing:
    routing = find_routing(model)
    assert routing is not None
    return routing


def experts_calls(model) -> list[tuple[Tensor, Tensor]]:
    """Indices and weights that experts were called with, layer by layer."""
    calls = []
    experts = [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
    handles = [m.register_forward_pre_hook(lambda _, args: calls.append(args[1:])) for m in experts]
    with torch.no_grad():
        model(TOKENS[None])
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("architecture", [*MIXTURES, "phimoe", "deepseek_v2"])
def test_recorded_routes_are_the_experts_that_are_called(architecture):
    model = tiny_model(architecture)
    calls = experts_calls(model)
    routing = routing_of(model)
    assert routing.shape == (len(calls), TOP_K)
    assert routing.dtype == np.uint8
    routes = recorded_routes(model, routing)
    np.testing.assert_array_equal(routes, torch.stack([c[0] for c in calls], 1).numpy())


@pytest.mark.parametrize("architecture", [*MIXTURES, "phimoe", "deepseek_v2"])
def test_recording_routes_does_not_change_the_output(architecture):
    model = tiny_model(architecture)
    with torch.no_grad():
        before = model(TOKENS[None]).logits
        routing_of(model).install([RecordedChoice() for _ in routing_of(model).routers])
        torch.testing.assert_close(model(TOKENS[None]).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_tokens_follow_the_rule_with_the_weights_of_the_router(architecture):
    model = tiny_model(architecture)
    routing = routing_of(model)
    check_replay(model, routing)
    replay = RouteReplay(routing)
    own = experts_calls(model)
    replay.begin(
        np.stack([indices.flip(1).numpy() for indices, _ in own], 1).astype(np.uint8), device=CPU
    )
    for (indices, weights), (replayed, theirs) in zip(own, experts_calls(model), strict=True):
        torch.testing.assert_close(replayed, indices.flip(1), rtol=0, atol=0)
        torch.testing.assert_close(theirs, weights.flip(1))
    strange = np.random.default_rng(0).permuted(
        np.tile(np.arange(NUM_EXPERTS), (len(TOKENS), len(own), 1)), axis=2
    )[..., :TOP_K]
    replay.begin(strange.astype(np.uint8), device=CPU)
    calls = experts_calls(model)
    np.testing.assert_array_equal(torch.stack([c[0] for c in calls], 1).numpy(), strange)
    assert all((weights > 0).all() for _, weights in calls)


def test_routers_that_choose_groups_first_give_weights_to_replayed_experts():
    model = tiny_model("deepseek_v2")
    routing = routing_of(model)
    check_replay(model, routing)
    gate = model.model.layers[1].mlp.gate
    other = recorded_routes(model, routing)[::-1].copy()  # other tokens' experts
    replay = RouteReplay(routing)
    replay.begin(other, device=CPU)
    seen: list[Tensor] = []
    handle = gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    ((indices, weights),) = experts_calls(model)
    handle.remove()
    np.testing.assert_array_equal(indices.numpy(), other[:, 0])
    scores = nn.functional.linear(seen[0], gate.weight).softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, indices))


def test_routers_that_call_max_give_weights_to_replayed_experts():
    model = tiny_model("phimoe")
    routing = routing_of(model)
    check_replay(model, routing)
    replay = RouteReplay(routing)
    own = experts_calls(model)
    routes = np.stack([indices.numpy() for indices, _ in own], 1).astype(np.uint8)
    replay.begin(routes, device=CPU)
    for ours, replayed in zip(own, experts_calls(model), strict=True):
        torch.testing.assert_close(replayed, ours, rtol=0, atol=0)
    other = np.roll(routes, 1, axis=0)
    replay.begin(other, device=CPU)
    router = model.model.layers[0].mlp.router
    seen: list[Tensor] = []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    (indices, weights), _ = experts_calls(model)
    handle.remove()
    np.testing.assert_array_equal(indices.numpy(), other[:, 0])
    scores = nn.functional.linear(seen[0], router.weight).detach()
    first, second = indices.split(1, dim=-1)
    # SparseMixer: a softmax over the scores that are not far below that of the chosen expert.
    for among, chosen, weight in (
        (scores, first, weights[:, :1]),
        (scores.scatter(-1, first, -torch.inf), second, weights[:, 1:]),
    ):
        value = among.gather(-1, chosen)
        is_far = (value - scores) / scores.abs().clamp(min=value) > 2 * router.router_jitter_noise
        expected = among.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, chosen)
        torch.testing.assert_close(weight, expected)
        assert (weight > 0).all()


def test_unknown_routes_use_the_routers_choice():
    model = tiny_model("qwen3_moe")
    routing = routing_of(model)
    own = recorded_routes(model, routing)
    replayed = (own + 1) % NUM_EXPERTS
    replayed[::2] = unknown_routes(len(replayed[::2]), like=replayed)
    replay = RouteReplay(routing)
    replay.begin(replayed, device=CPU)
    used = torch.stack([c[0] for c in experts_calls(model)], 1).numpy()
    np.testing.assert_array_equal(used[1::2], replayed[1::2])
    np.testing.assert_array_equal(used[::2, 0], own[::2, 0])  # later layers see other inputs
    replay.begin(None, device=CPU)
    used = torch.stack([c[0] for c in experts_calls(model)], 1).numpy()
    np.testing.assert_array_equal(used, own)


def test_gradients_reach_the_router_through_the_weights_of_replayed_experts():
    model = tiny_model("qwen3_moe")
    replay = RouteReplay(routing_of(model))
    replay.begin(np.tile(np.uint8([5, 6]), (len(TOKENS), 2, 1)), device=CPU)
    model(TOKENS[None]).logits.square().sum().backward()
    for layer in model.model.layers:
        moved = layer.mlp.gate.weight.grad.abs().sum(1) > 0
        assert moved.all()  # a softmax over all of them
        used = layer.mlp.experts.down_proj.grad.abs().sum((1, 2)) > 0
        assert used.nonzero().squeeze(1).tolist() == [5, 6]


def test_a_dense_model_has_no_routing():
    assert find_routing(tiny_model("qwen3")) is None


def test_more_than_255_experts_take_two_bytes():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(
        **shape,
        vocab_size=VOCAB,
        num_key_value_heads=1,
        num_experts=300,
        moe_intermediate_size=4,
    )
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    nn.init.normal_(model.model.layers[0].mlp.gate.weight)
    routing = routing_of(model)
    assert routing.dtype == np.uint16
    own = recorded_routes(model, routing)
    assert own.max() > 255
    replay = RouteReplay(routing)
    replay.begin((own + 7) % 300, device=CPU)
    np.testing.assert_array_equal(experts_calls(model)[0][0].numpy(), (own[:, 0] + 7) % 300)


def test_experts_chosen_without_a_topk_are_refused():
    model = tiny_model("qwen3_moe")
    gate = model.model.layers[1].mlp.gate

    def by_sorting(hidden):
        scores = nn.functional.linear(hidden, gate.weight).softmax(-1)
        order = scores.argsort(-1, descending=True)[:, :TOP_K]
        return scores, scores.gather(-1, order), order

    gate.forward = by_sorting
    with pytest.raises(ConfigError, match=r"topk per layer.*replay_routes to false"):
        find_routing(model)


def test_routers_that_weigh_only_their_own_choice_are_refused():
    model = tiny_model("qwen3_moe")
    gate = model.model.layers[0].mlp.gate

    def masking(hidden):
        scores = nn.functional.linear(hidden, gate.weight).softmax(-1)
        least = scores.topk(TOP_K + 1, -1).values[:, -1:]
        values, indices = torch.topk(scores * (scores >= least), TOP_K, dim=-1)
        return scores, values, indices

    gate.__class__ = type("Masking", (type(gate),), {"forward": lambda _, hidden: masking(hidden)})
    routing = routing_of(model)
    with pytest.raises(ConfigError, match=r"give weights only to experts.*replay_routes to false"):
        check_replay(model, routing)
