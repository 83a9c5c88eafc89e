import dataclasses

import pytest
import torch
from loss_tokens import loss_of, random_tokens

from millrace.training.losses.loss import TokenBatch, TokenSegments
from millrace.training.losses.recipes import RECIPES
from millrace.training.metrics import StepMetrics, summarize

pytestmark = pytest.mark.gpu

ALL_WEIGHTS = {"max_token_staleness": 2, "staleness_half_life": 1, "off_policy_limit": 0.1}


def moved(tokens: TokenBatch, device: str) -> TokenBatch:
    columns = {}
    for field in dataclasses.fields(tokens):
        value = getattr(tokens, field.name)
        if isinstance(value, TokenSegments):
            columns[field.name] = TokenSegments(
                ids=value.ids.to(device), lengths=value.lengths.to(device)
            )
        elif isinstance(value, torch.Tensor):
            needs = value.requires_grad
            columns[field.name] = value.detach().float().to(device).requires_grad_(needs)
    columns["staleness"] = tokens.staleness.to(device)
    return dataclasses.replace(tokens, **columns)


def outcome(name: str, tokens: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    loss = loss_of(name, kl=0.1, entropy_bonus=0.01, **ALL_WEIGHTS)
    value, _ = loss(tokens)
    return value, torch.autograd.grad(value, tokens.trainer_logprobs)[0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_computes_on_a_gpu_what_it_computes_on_a_cpu(name):
    tokens = random_tokens([40, 3, 17], seed=1)
    expected = outcome(name, moved(tokens, "cpu"))
    for found, on_cpu in zip(outcome(name, moved(tokens, "cuda")), expected, strict=True):
        torch.testing.assert_close(found.cpu(), on_cpu, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_metrics_do_not_wait_for_the_device(name):
    loss = loss_of(name, kl=0.1, entropy_bonus=0.01, **ALL_WEIGHTS)
    tokens = moved(random_tokens([40, 3, 17], seed=1), "cuda")
    metrics = StepMetrics()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value, named = loss(tokens)
        value.backward()
        metrics.add(tokens, loss=value.detach(), named=named)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = StepMetrics()
    tokens = moved(tokens, "cpu")
    value, named = loss(tokens)
    on_cpu.add(tokens, loss=value.detach(), named=named)
    assert summarize([metrics.on_host()]) == pytest.approx(
        summarize([on_cpu.on_host()]), rel=1e-4, abs=1e-6
    )
