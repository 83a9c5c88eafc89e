"""Architectures that few other tests name: sinks, recurrent states beside attention, mixtures.

Each has the logprobs, tokens and gradients of plain transformers, in engine and trainer.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from architectures import tiny_model
from batches import batch_of, in_order_of, sharing_rollouts, trainer_of
from engine_rig import (
    EOS,
    assert_same,
    assert_sampled_from,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
    weights,
)
from transformers import DynamicCache, PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from millrace.config import LoraConfig
from millrace.core.errors import ConfigError
from millrace.models.attention.recurrent import fix_time_limits, mixers_of
from millrace.models.lora.factors import adapter_of
from millrace.models.lora.trained import TrainedAdapter

RECURRENT = ("lfm2", "falcon_h1", "qwen3_5", "qwen3_next", "nemotron_h", "granite4")
SLOW = (*RECURRENT[2:], "llama4", "phimoe", "deepseek_v2")
NAMED = [
    "lfm2",
    "gpt_oss",
    "falcon_h1",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]
LORA = LoraConfig(rank=4, alpha=8.0)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")

pytestmark = pytest.mark.parametrize("architecture", NAMED)


@functools.cache
def plain(architecture: str, *, seed: int = 0) -> PreTrainedModel:
    """With the time limits of its configuration, which transformers ignores in Nemotron-H."""
    model = tiny_model(architecture, seed=seed)
    fix_time_limits(model)
    model.set_attn_implementation("eager")
    return model


@contextlib.contextmanager
def expanded_cache(architecture: str) -> Iterator[None]:
    """The keys and values of DeepSeek-V2 as the old weights expanded them. transformers caches them
    compressed, and the new weights would expand them."""
    if architecture != "deepseek_v2":
        yield
        return
    layer = DeepseekV2Attention
    expand, update = layer.expand_kv, DynamicCache.update
    caches: list[DynamicCache] = []

    def keep(cache, *states):
        caches.append(cache)
        return states[:2]

    def expand_and_keep(self, *states):
        return update(caches.pop(), *expand(self, *states), self.layer_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicCache, "update", keep)
        patch.setattr(layer, "expand_kv", expand_and_keep)
        yield


def requests_of(*, n: int = 1, **sampling):
    lengths = (1, 4, 9, 17, 30)
    settings = {"max_new_tokens": 12, **sampling}
    return [
        make_request(str(i), prompt=prompt_of(length, seed=i), n=n, seed=i, **settings)
        for i, length in enumerate(lengths)
    ]


def test_preempted_sequences_have_the_logprobs_of_a_plain_forward_pass(architecture):
    engine = make_engine(architecture, eos_ids=(), num_blocks=22, prefill_tokens=13)
    requests = requests_of(n=2)
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().free_blocks == 22
    for request in requests:
        for completion in done[request.id]:
            logits = plain_logits(plain(architecture), request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)


def test_greedy_tokens_are_those_of_generate(architecture):
    requests = requests_of(temperature=0.0)
    done = finish_all(make_engine(architecture, num_blocks=22, prefill_tokens=11), requests)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    for request in requests:
        ids = torch.from_numpy(request.prompt).long()[None]
        mask = torch.ones_like(ids)
        expected = plain(architecture).generate(ids, attention_mask=mask, **settings)
        tokens = done[request.id][0].tokens
        np.testing.assert_array_equal(tokens, expected[0, len(request.prompt) :].numpy())


def test_turns_reuse_the_cached_prefix_until_weights_change(architecture):
    engine = make_engine(architecture, eos_ids=())
    said = prompt_of(0)
    for turn in range(4):
        if turn == 3:
            engine.swap(weights(architecture, seed=1), version=1)
        prompt = np.concatenate([said, prompt_of(7, seed=turn)])
        request = make_request(prompt=prompt, n=2, max_new_tokens=5)
        before = engine.stats().cached_tokens
        done = finish_all(engine, [request])["r"]
        num_known = 0 if turn == 3 else max(len(said) - 1, 0) // 4 * 4
        assert engine.stats().cached_tokens - before == num_known
        for completion in done:
            logits = plain_logits(plain(architecture, seed=turn // 3), prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)
        said = np.concatenate([prompt, done[0].tokens])


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_after_a_swap_are_of_the_new_version(architecture, kv):
    engine = make_engine(architecture, eos_ids=(), kv=kv)
    requests = requests_of()
    for request in requests:
        engine.add_request(request)
    for _ in range(5):
        assert not engine.step()
    engine.swap(weights(architecture, seed=1), version=1)
    done = finish_all(engine)
    old, new = plain(architecture), plain(architecture, seed=1)
    for request in requests:
        (completion,) = done[request.id]
        num_old = int((completion.versions == 0).sum())
        assert 0 < num_old < 12
        if kv == "recompute":
            logits = plain_logits(new, request.prompt, completion)
        else:
            tokens = torch.from_numpy(np.concatenate([request.prompt, completion.tokens])).long()
            # The last old token was fed to the new version.
            split = len(request.prompt) + num_old - 1
            with torch.no_grad(), expanded_cache(architecture):
                cache = old(input_ids=tokens[None, :split], use_cache=True).past_key_values
                rows = [
                    new(input_ids=tokens[None, at : at + 1], past_key_values=cache).logits[0, -1]
                    for at in range(split, len(tokens) - 1)
                ]
            logits = torch.stack(rows)
        first = plain_logits(old, request.prompt, completion)[:num_old]
        logits = torch.cat([first, logits[num_old - 12 :]])
        assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)


def plain_logprobs(logits_of, rollouts, part) -> torch.Tensor:
    """[N] logprobs of the trained tokens of `part`, each rollout by itself. logits_of: the function
    from tokens [1, L] to logits [1, L, V]."""
    found = []
    for rollout in in_order_of(rollouts, part):
        tokens = torch.from_numpy(rollout.tokens).long()
        rows = logits_of(tokens[None])[0, :-1].double() / rollout.sampling.temperature
        if (kept := rollout.kept) is not None:
            allowed = torch.zeros_like(rows, dtype=torch.bool)
            for at, own in enumerate(np.split(kept.ids, kept.offsets[1:-1])[1:]):
                allowed[at, own.tolist() if len(own) else slice(None)] = True
            rows = rows.masked_fill(~allowed, -torch.inf)
        trained = torch.from_numpy(rollout.mask[1:])
        found.append(rows.log_softmax(-1).gather(-1, tokens[1:, None])[trained, 0])
    return torch.cat(found)


def plain_in_float64(architecture: str) -> PreTrainedModel:
    """The float32 gradients of plain transformers may be further off than ours."""
    model = copy.deepcopy(plain(architecture)).double()
    model.set_experts_implementation("eager")  # torch has no grouped products in float64
    return model


def assert_same_gradient(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=2e-5 * scale + 1e-6, msg=name)


def test_packed_gradients_of_every_parameter_are_those_of_plain_sequences(architecture):
    rollouts = sharing_rollouts(np.random.default_rng(3), prompt=11, num=4, sampled=9)
    (part,) = batch_of(rollouts).microbatches
    trainer = trainer_of(tiny_model(architecture))
    logprobs = trainer.policy.logprobs(part).logprobs
    torch.manual_seed(0)
    loss_weights = torch.randn(len(logprobs))
    (logprobs * loss_weights).sum().backward()
    model = plain_in_float64(architecture)
    theirs = plain_logprobs(lambda tokens: model(input_ids=tokens).logits, rollouts, part)
    torch.testing.assert_close(logprobs.double(), theirs, rtol=0, atol=5e-5)
    (theirs * loss_weights).sum().backward()
    ours = dict(trainer.policy.module.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert (gradient is None) == (ours[name].grad is None), name
        if gradient is not None:
            assert_same_gradient(ours[name].grad, gradient, name)
    assert sum(parameter.grad is not None for parameter in ours.values()) > len(ours) / 2


def test_packed_gradients_of_an_adapter_are_those_of_plain_merged_weights(architecture):
    targets = {"target_modules": LINEAR} if architecture == "llama4" else {}
    lora = LORA.model_copy(update=targets)
    rollouts = sharing_rollouts(np.random.default_rng(3), prompt=11, num=4, sampled=9)
    (part,) = batch_of(rollouts).microbatches
    base = tiny_model(architecture)
    adapter = TrainedAdapter(base, lora, model_path="tiny")
    torch.manual_seed(1)
    for weight in adapter.named_weights().values():
        weight.normal_(std=0.1)
    given = {name: w.double().clone() for name, w in adapter.named_weights().items()}
    logprobs = trainer_of(base, adapter=adapter).policy.logprobs(part).logprobs
    loss_weights = torch.randn(len(logprobs))
    (logprobs * loss_weights).sum().backward()
    by_address = {parameter.data_ptr(): parameter.grad for parameter in base.parameters()}
    ours = {name: by_address[w.data_ptr()] for name, w in adapter.named_weights().items()}

    model, merging = plain_in_float64(architecture), adapter_of(plain(architecture), lora)
    tensors = {name: weight.requires_grad_() for name, weight in given.items()}
    names = {layer: merging.weight_name(layer) for layer in merging.layers}
    merged = {
        name: merging.merged(layer, model.get_parameter(name), tensors, dtype=torch.float64)
        for layer, name in names.items()
    }

    def logits_of(tokens: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, merged, kwargs={"input_ids": tokens}).logits

    theirs = plain_logprobs(logits_of, rollouts, part)
    torch.testing.assert_close(logprobs.double(), theirs, rtol=0, atol=5e-5)
    (theirs * loss_weights).sum().backward()
    assert ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        assert_same_gradient(ours[name], tensor.grad, name)


def test_a_merged_adapter_gives_the_logprobs_of_the_trainer(architecture):
    lora = LORA
    if architecture == "llama4":
        with pytest.raises(ConfigError, match="cannot adapt GroupedLlama4Experts, whose"):
            make_engine(architecture, lora=lora)
        lora = lora.model_copy(update={"target_modules": LINEAR})
    engine = make_engine(architecture, lora=lora, eos_ids=())
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator)
        for name, shape in engine.parameter_shapes().items()
    }
    engine.swap(tensors, version=1)
    request = make_request(prompt=9, n=2)
    done = finish_all(engine, [request])["r"]
    model = copy.deepcopy(plain(architecture))
    adapter = TrainedAdapter(model, lora, model_path="tiny")
    for name, weight in adapter.named_weights().items():
        weight.copy_(tensors[name])
    for completion in done:
        logits = plain_logits(model, request.prompt, completion)
        assert_sampled_from(logits, completion, request.sampling, tolerance=2e-4)
    unmerged = lora.model_copy(update={"apply": "unmerged"})
    if mixers_of(plain(architecture)):
        with pytest.raises(ConfigError, match=r"a layer with a recurrent state.*apply to 'merged'"):
            make_engine(architecture, lora=unmerged)
        return
    beside = make_engine(architecture, lora=unmerged, eos_ids=())
    beside.swap(tensors, version=1)
    for ours, theirs in zip(finish_all(beside, [request])["r"], done, strict=True):
        assert_same(ours, theirs)


def test_exact_mode_refuses_it_with_the_reason_or_computes_the_same(architecture):
    request, settings = make_request(n=2), {"eos_ids": (), "exact": True}
    if architecture in ("phimoe", "deepseek_v2", "llama4"):
        done = finish_all(make_engine(architecture, **settings), [request])["r"]
        for completion in done:
            logits = plain_logits(plain(architecture), request.prompt, completion)
            assert_sampled_from(logits, completion, request.sampling, tolerance=5e-5)
        return
    reason = "attention sinks" if architecture == "gpt_oss" else "a recurrent state"
    with pytest.raises(ConfigError, match=rf"'exact' does not support.*{reason}.*to 'fast'\."):
        finish_all(make_engine(architecture, **settings), [request])
