import math

import pytest
import torch

from millrace.training.losses.loss import TokenBatch, TokenSegments
from millrace.training.metrics import StepMetrics, summarize


def tokens_of(ratios) -> TokenBatch:
    ratios = torch.tensor(ratios)
    ids = torch.zeros(len(ratios), dtype=torch.int64)
    segments = TokenSegments(ids=ids, lengths=torch.tensor([len(ratios)]))
    return TokenBatch(
        trainer_logprobs=ratios.log() - 3,
        engine_logprobs=torch.full_like(ratios, -3.0),
        entropies=torch.ones_like(ratios),
        advantages=torch.ones_like(ratios),
        staleness=ids,
        sequences=segments,
        turns=segments,
        num_trained_tokens=len(ratios),
        num_sequences=1,
    )


def summary_of(*parts) -> dict[str, float]:
    metrics = StepMetrics()
    for ratios in parts:
        metrics.add(tokens_of(ratios), loss=torch.tensor(0.5), named={})
    return summarize([metrics.on_host()])


def test_metrics_of_on_policy_tokens_are_exact():
    summary = summary_of([1.0] * 7)
    for name in ("ratio/mean", "ratio/min", "ratio/max", "ratio/p01", "ratio/p99"):
        assert summary[name] == 1.0, name
    assert summary["ratio/effective_sample_size"] == 1.0
    assert (
        summary["mismatch/kl_k1"] == summary["mismatch/kl_k2"] == summary["mismatch/kl_k3"] == 0.0
    )


def test_hand_computed_ratios():
    summary = summary_of([0.5, 2.0, 1.0])
    assert summary["ratio/mean"] == pytest.approx(3.5 / 3)
    assert (summary["ratio/min"], summary["ratio/max"]) == pytest.approx((0.5, 2.0))
    assert summary["ratio/effective_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert summary["mismatch/kl_k1"] == pytest.approx(0.0, abs=1e-6)
    assert summary["mismatch/kl_k2"] == pytest.approx(math.log(2) ** 2 / 3)
    assert summary["mismatch/kl_k3"] == pytest.approx(0.5 / 3)


def test_quantiles_are_right_to_a_hundredth():
    ratios = torch.linspace(0.7, 1.6, 5001).tolist()
    summary = summary_of(ratios[:2000], ratios[2000:])
    assert summary["ratio/p01"] == pytest.approx(0.709, rel=0.01)
    assert summary["ratio/p99"] == pytest.approx(1.591, rel=0.01)


def test_parts_of_a_step_add_up_to_the_whole():
    whole = summary_of([0.5, 2.0], [1.5])
    first, second = StepMetrics(), StepMetrics()
    first.add(tokens_of([0.5, 2.0]), loss=torch.tensor(0.5), named={})
    second.add(tokens_of([1.5]), loss=torch.tensor(0.5), named={})
    together = StepMetrics()
    together.extend(first)
    together.extend(second)
    assert summarize([together.on_host()]) == whole


def test_nan_logprobs_give_nan_metrics():
    assert math.isnan(summary_of([math.nan, 1.0])["ratio/mean"])
