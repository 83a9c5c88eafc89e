"""Experts of Llama 4 as grouped products, against those of transformers."""

import copy

import numpy as np
import pytest
import torch
from architectures import NUM_EXPERTS, tiny_model
from transformers import Llama4ForCausalLM, Llama4TextConfig, PreTrainedModel

from millrace.models.architectures.llama4 import GroupedLlama4Experts, use_own_classes
from millrace.models.attention.packed import PACKED
from millrace.models.loading import load_model
from millrace.models.routing import RouteReplay, check_replay, find_routing

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 23)[None]


def model_with(top_k: int) -> PreTrainedModel:
    shape = dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), 24)
    torch.manual_seed(0)
    return Llama4ForCausalLM(
        Llama4TextConfig(
            **shape,
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=top_k,
            initializer_range=0.2,
            pad_token_id=0,
        )
    ).eval()


def gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(TOKENS).logits
    torch.manual_seed(1)
    (logits * torch.randn_like(logits)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("top_k", [1, 2])
def test_grouped_experts_have_the_logits_and_gradients_of_transformers(top_k):
    plain = model_with(top_k)
    grouped = copy.deepcopy(plain)
    use_own_classes(grouped)
    logits, expected = gradients(plain)
    ours, found = gradients(grouped)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_a_loaded_model_computes_a_token_by_its_experts_only(tmp_path):
    plain = tiny_model("llama4")
    plain.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device=CPU, attention=PACKED)
    (experts,) = [m for m in model.modules() if isinstance(m, GroupedLlama4Experts)]
    rows: list[int] = []
    experts.act_fn.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    model.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    few = TOKENS[:, :9]  # transformers scales the queries of later ones in its own forward pass
    with torch.no_grad():
        torch.testing.assert_close(model(few).logits, plain(few).logits, rtol=0, atol=1e-5)
    assert rows == [9]  # one expert for each, of 8
    names = [[name for name, _ in one.named_parameters()] for one in (model, plain)]
    assert names[0] == names[1]


def test_replayed_experts_scale_their_inputs_by_the_scores_of_the_router():
    model = model_with(2)
    use_own_classes(model)
    routing = find_routing(model)
    assert routing is not None
    assert routing.shape == (2, 2)
    check_replay(model, routing)
    routes = np.random.default_rng(0).permuted(
        np.tile(np.arange(NUM_EXPERTS), (TOKENS.numel(), 2, 1)), axis=2
    )[..., :2]
    RouteReplay(routing).begin(routes.astype(np.uint8), device=CPU)
    block = model.model.layers[0].feed_forward
    hidden = torch.randn(TOKENS.numel(), 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output, scores = block(hidden)
        expected = block.shared_expert(hidden)
        for token, chosen in enumerate(routes[:, 0]):
            for expert in chosen:
                scaled = hidden[token] * scores[token, expert].sigmoid()
                gate, up = (scaled @ block.experts.gate_up_proj[expert]).chunk(2)
                middle = up * torch.nn.functional.silu(gate)
                expected[token] += middle @ block.experts.down_proj[expert]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
