"""Adapters of experts: their gradients, and what trainer, PEFT and engines compute with them."""

import dataclasses

import numpy as np
import pytest
import torch
from architectures import MIXTURE, MIXTURES, NUM_EXPERTS, TOP_K, VOCAB, tiny_model
from batches import batch_of, mixed_rollouts, sharing_rollouts, trainer_of
from engine_rig import finish_all, make_engine, make_request, plain_logits
from peft import PeftModel
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from millrace.config import LoraConfig
from millrace.core.errors import ConfigError
from millrace.models.loading import write_model
from millrace.models.lora.factors import adapted_layers, adapter_of, describe_layers
from millrace.models.lora.folders import read_checkpoint, read_resident
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.routing import RouteReplay, find_routing

LORA = LoraConfig(rank=3, alpha=4.5)  # of a rank that grouped products must pad
TOKENS = torch.arange(3, 40)[None]
EXPERTS = "model.layers.1.mlp.experts"


def adapted(architecture: str = MIXTURE, lora: LoraConfig = LORA):
    """A model and its adapter. B is not 0, so that A has a gradient, too."""
    model = tiny_model(architecture)
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    torch.manual_seed(3)
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.2)
    return model, adapter


def gradients_of(model, weights) -> dict[str, torch.Tensor]:
    by_address = {p.data_ptr(): p.grad for p in model.parameters()}
    return {name: by_address[weight.data_ptr()] for name, weight in weights.items()}


def merged_parameters(model, leaves) -> dict[str, torch.Tensor]:
    """W + scale * B A, as a function of A and B."""
    adapter = adapter_of(model, LORA)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for layer in adapter.layers:
        name = adapter.weight_name(layer)
        parameters[name] = adapter.merged(layer, parameters[name], leaves)
    return parameters


def assert_close_gradients(ours, expected, *, tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        assert (ours[name] - gradient).abs().max() / largest < tolerance, name


def grown(weights) -> dict[str, torch.Tensor]:
    return {name: weight.clone().requires_grad_() for name, weight in weights.items()}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_gradients_of_a_model_are_those_of_merged_weights(architecture):
    model, adapter = adapted(architecture)
    weights = adapter.named_weights()
    probe = torch.randn(1, TOKENS.shape[1], VOCAB)
    (model(TOKENS).logits * probe).sum().backward()
    leaves, plain = grown(weights), tiny_model(architecture)
    logits = functional_call(plain, merged_parameters(plain, leaves), (TOKENS,)).logits
    (logits * probe).sum().backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    # The two differ by the rounding of the merged weights, which the layers above amplify.
    assert_close_gradients(gradients_of(model, weights), expected, tolerance=2e-5)
    assert sum(p.grad is not None for p in model.parameters()) == len(weights)


def expert_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and weights of 9 tokens; the last expert gets none."""
    torch.manual_seed(4)
    chosen = torch.rand(9, NUM_EXPERTS - 1).topk(TOP_K).indices
    return torch.randn(9, 32, requires_grad=True), chosen, torch.rand(9, TOP_K)


def test_gradients_of_experts_are_those_of_merged_weights():
    model, adapter = adapted()
    own = {n: w for n, w in adapter.named_weights().items() if n.startswith(f"{EXPERTS}.")}
    hidden, chosen, weights = expert_inputs()
    probe = torch.randn_like(hidden)
    (model.get_submodule(EXPERTS)(hidden, chosen, weights) * probe).sum().backward()
    ours = gradients_of(model, own) | {"hidden": hidden.grad}
    leaves, plain = grown(adapter.named_weights()), tiny_model(MIXTURE)
    parameters = merged_parameters(plain, leaves)
    module = plain.get_submodule(EXPERTS)
    parameters = {n: parameters[f"{EXPERTS}.{n}"] for n, _ in module.named_parameters()}
    hidden.grad = None
    (functional_call(module, parameters, (hidden, chosen, weights)) * probe).sum().backward()
    expected = {name: leaves[name].grad for name in own} | {"hidden": hidden.grad}
    assert_close_gradients(ours, expected, tolerance=1e-6)


def test_experts_of_other_ranks_are_left_out():
    """As transformers does under expert parallelism: their ids are the number of own experts."""
    model, _ = adapted()
    experts = model.get_submodule(EXPERTS)
    hidden, chosen, weights = expert_inputs()
    is_own = chosen < NUM_EXPERTS // 2
    expected = experts(hidden, chosen, weights * is_own)
    experts._is_expert_parallel, experts.num_experts = True, NUM_EXPERTS // 2
    for tensors in (experts, *experts.expert_updates.values()):
        for name, parameter in list(tensors.named_parameters(recurse=False)):
            setattr(tensors, name, torch.nn.Parameter(parameter.data[: NUM_EXPERTS // 2]))
    output = experts(hidden, chosen.where(is_own, NUM_EXPERTS // 2), weights * is_own)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[~is_own.any(1)].abs().sum() == 0
    assert hidden.grad.isfinite().all()


def test_all_linear_includes_experts_and_names_select_them():
    model = tiny_model("qwen2_moe")
    endings = {name.split(".mlp.")[-1] for name in adapted_layers(model, LoraConfig())}
    assert endings >= {"experts.gate_up_proj", "experts.down_proj", "shared_expert.down_proj"}
    only = adapted_layers(model, LoraConfig(target_modules=("experts.down_proj",)))
    assert only == {f"model.layers.{i}.mlp.experts.down_proj": (8, 32, 16) for i in (0, 1)}
    both = adapted_layers(model, LoraConfig(target_modules=("down_proj",)))
    assert len(both) == 4


def test_description_of_an_adapter_counts_linear_layers_experts_and_weights():
    layers = {"q_proj": (8, 4), "k_proj": (2, 4), "0.experts.down_proj": (3, 4, 6)}
    layers["1.experts.down_proj"] = (3, 4, 6)
    assert describe_layers(layers, rank=2) == (
        "LoRA of rank 2 adapts 2 linear layers and 6 experts in 2 layers; it has 156 weights."
    )
    model = tiny_model("qwen2_moe")
    assert " and 16 experts in 2 layers; " in describe_layers(
        adapted_layers(model, LoraConfig()), rank=4
    )
    of_attention = adapted_layers(model, LoraConfig(target_modules=("q_proj", "v_proj")))
    assert describe_layers(of_attention, rank=4).startswith(
        "LoRA of rank 4 adapts 4 linear layers; it has "
    )


def test_dora_and_experts_of_another_layout_are_refused():
    model = tiny_model(MIXTURE)
    with pytest.raises(ConfigError, match=r"lora\.dora = true cannot adapt experts; list"):
        adapter_of(model, LoraConfig(dora=True))
    linears = LoraConfig(dora=True, target_modules=("q_proj",))
    assert len(adapter_of(model, linears).layers) == 2
    model.get_submodule(EXPERTS).has_post_expert_norm = True
    with pytest.raises(ConfigError, match=r"cannot adapt Qwen3MoeExperts, whose weights have"):
        adapter_of(model, LoraConfig())


SETTINGS = {
    "all": LORA,
    "rslora": LoraConfig(rank=4, rslora=True),
    "down": LoraConfig(rank=4, target_modules=("experts.down_proj",)),
    "up": LoraConfig(rank=4, target_modules=("q_proj", "experts.gate_up_proj")),
}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("lora", SETTINGS.values(), ids=SETTINGS)
@torch.no_grad()
def test_peft_loads_adapters_of_experts_and_computes_the_same(architecture, lora, tmp_path):
    model, adapter = adapted(architecture, lora)
    adapter.write(adapter.named_weights(), tmp_path)
    expected = model(TOKENS).logits
    loaded = PeftModel.from_pretrained(tiny_model(architecture), tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    base = tiny_model(architecture)(TOKENS).logits
    assert (base - expected).abs().max() > 0.1
    with adapter.disabled():
        assert torch.equal(model(TOKENS).logits, base)
    again = TrainedAdapter(tiny_model(architecture), lora, model_path="tiny")
    again.load(tmp_path)
    for name, weight in adapter.named_weights().items():
        assert torch.equal(again.named_weights()[name], weight), name


@pytest.mark.parametrize("architecture", MIXTURES)
@torch.no_grad()
def test_merged_experts_load_with_transformers_and_compute_the_same(architecture, tmp_path):
    model, adapter = adapted(architecture)
    write_model(model, adapter.merged_weights(), tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(
        loaded.eval()(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_an_engine_serves_adapters_of_experts_in_one_batch(decode_steps, tmp_path):
    """The policy's adapter, the base model and a folder that PEFT users name by its suffixes."""
    folders = {None: tmp_path / "policy", "other": tmp_path / "other"}
    loras = {None: LORA.model_copy(update={"apply": "unmerged"}), "other": SETTINGS["up"]}
    for name, folder in folders.items():
        folder.mkdir()
        _, adapter = adapted(MIXTURE, loras[name])
        adapter.write(adapter.named_weights(), folder)
    settings = folders["other"] / "adapter_config.json"
    full = [f'"model.layers.{i}.mlp.experts.gate_up_proj"' for i in (0, 1)]
    text = settings.read_text()
    assert all(name in text for name in full)
    text = text.replace(full[0], '"experts.gate_up_proj"').replace(full[1], '"gate_up_proj"')
    settings.write_text(text)
    other = read_resident("other", folders["other"], model=tiny_model(MIXTURE))
    engine = make_engine(
        MIXTURE,
        lora=loras[None],
        residents={"other": other},
        eos_ids=(),
        decode_steps=decode_steps,
    )
    engine.swap(read_checkpoint(folders[None]), version=1)
    requests = [
        dataclasses.replace(make_request(str(name), prompt=9), adapter=name)
        for name in (None, "base", "other")
    ]
    done = finish_all(engine, requests)
    for request in requests:
        model = tiny_model(MIXTURE)
        if request.adapter != "base":
            model = PeftModel.from_pretrained(model, folders[request.adapter]).eval()
        (completion,) = done[request.id]
        logprobs = plain_logits(model, request.prompt, completion).log_softmax(-1)
        tokens = torch.from_numpy(completion.tokens).long()[:, None]
        expected = logprobs.gather(-1, tokens).squeeze(-1).numpy()
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)
    assert len({tuple(done[request.id][0].tokens) for request in requests}) == 3


def lora_trainer(**settings):
    model, adapter = adapted()
    routing = find_routing(model)
    assert routing is not None
    return trainer_of(model, adapter=adapter, replay=RouteReplay(routing), **settings)


def test_only_the_adapter_of_experts_is_trained_and_a_resumed_one_continues(tmp_path):
    rng = np.random.default_rng(5)
    first, second = batch_of(mixed_rollouts(rng, 6)), batch_of(sharing_rollouts(rng))
    trainer = lora_trainer(weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in trainer.policy.module.named_parameters()}
    trainer.step(first)
    after = dict(trainer.policy.module.named_parameters())
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    assert changed == {name for name in before if ".lora_" in name}
    assert any("experts" in name for name in changed)
    trainer.snapshot().write(tmp_path)
    metrics = trainer.step(second)
    resumed = lora_trainer(weight_decay=0.1)
    resumed.restore(tmp_path)
    assert resumed.step(second) == metrics


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_adapters_of_experts_compute_in_half_precision_under_autocast(checkpointing):
    rng = np.random.default_rng(1)
    (part,) = batch_of(sharing_rollouts(rng)).microbatches
    routes = rng.integers(0, NUM_EXPERTS, (len(part.tokens), 2, TOP_K)).astype(np.uint8)
    part = dataclasses.replace(part, routes=routes)  # rounding must not change them
    exact = lora_trainer()
    half = lora_trainer(compute_dtype=torch.bfloat16, gradient_checkpointing=checkpointing)
    seen: list[torch.dtype] = []
    experts = half.policy.module.get_submodule(EXPERTS)
    experts.act_fn.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    gradients = []
    for trainer in (exact, half):
        trainer.policy.logprobs(part).logprobs.sum().backward()
        gradients.append(gradients_of(trainer.policy.module, trainer.policy.weights()))
    assert set(seen) == {torch.bfloat16}
    for name, gradient in gradients[0].items():
        if ".experts." in name:
            ours = gradients[1][name]
            assert ours.dtype == torch.float32
            assert torch.cosine_similarity(ours.flatten(), gradient.flatten(), dim=0) > 0.9, name


def test_frozen_matrices_in_bfloat16_compute_what_float32_copies_of_them_do():
    (part,) = batch_of(sharing_rollouts(np.random.default_rng(1))).microbatches
    results = []
    for frozen_dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("qwen2_moe").bfloat16().to(frozen_dtype)
        torch.manual_seed(3)
        adapter = TrainedAdapter(model, LORA, model_path="tiny")
        for weight in adapter.named_weights().values():
            weight.copy_(torch.randn(weight.shape) * 0.2)
        trainer = trainer_of(model, adapter=adapter, compute_dtype=torch.bfloat16)
        logprobs = trainer.policy.logprobs(part).logprobs
        logprobs.sum().backward()
        gradients = gradients_of(model, trainer.policy.weights())
        results.append({"logprobs": logprobs.detach(), **gradients})
        dtypes = {p.dtype for p in model.parameters()}
        assert dtypes == {torch.float32, frozen_dtype}
        assert adapter.merged_weights()[f"{EXPERTS}.down_proj"].dtype == frozen_dtype
    halves = [n for n, p in model.named_parameters() if p.dtype == torch.bfloat16]
    assert all("_proj" in name or "shared_expert_gate" in name for name in halves)
    assert not any(".lora_" in name or name.endswith("bias") for name in halves)
    assert len(halves) == 2 * (4 + 2 + 4)
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name
