"""Sampling, truncation and random numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from engine_rig import distribution

from millrace.core.records import Sampling
from millrace.inference.embedded.sampler import (
    SamplerOutput,
    SamplingBatch,
    sample,
    stream_key,
    uniforms,
)

VOCAB = 50


def rows_of(settings: list[Sampling], *, vocab_size: int = VOCAB, seed: int = 0) -> SamplingBatch:
    """One row per setting, each the first token of completion `row`."""

    def column(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    greedy = [s.temperature == 0 for s in settings]
    ordered = [s.top_k or (vocab_size if s.top_p < 1 else 0) for s in settings if s.truncates]
    return SamplingBatch(
        temperatures=column([s.temperature for s in settings], torch.float32),
        top_k=column([s.top_k for s in settings], torch.int64),
        top_p=column([s.top_p for s in settings], torch.float32),
        min_p=column([s.min_p for s in settings], torch.float32),
        keys=column([stream_key(seed, row) for row in range(len(settings))], torch.int64),
        positions=torch.zeros(len(settings), dtype=torch.int64),
        any_greedy=any(greedy),
        all_greedy=all(greedy),
        any_truncates=any(s.truncates for s in settings),
        num_ordered=min(max(ordered, default=0), vocab_size),
    )


def kept_rows(drawn: SamplerOutput) -> list[list[int]]:
    assert drawn.kept is not None
    return [
        drawn.kept.ids[start:stop].tolist() or list(range(VOCAB))
        for start, stop in zip(drawn.kept.offsets[:-1], drawn.kept.offsets[1:], strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        [Sampling(top_k=k) for k in (1, 2, 10, 49, 50, 1000)],
        [Sampling(top_p=p) for p in (1e-6, 0.3, 0.9, 0.999)],
        [Sampling(min_p=p) for p in (0.001, 0.05, 0.5, 1.0)],
        [Sampling(top_k=k, top_p=p, min_p=m) for k, p, m in [(20, 0.7, 0.0), (5, 0.95, 0.1)]],
        [
            Sampling(top_k=3),
            Sampling(),
            Sampling(temperature=0.0, top_k=2),
            Sampling(min_p=0.1, temperature=0.6),
            Sampling(top_p=0.5, temperature=2.0),
            Sampling(top_k=30, min_p=0.02),
        ],
    ],
    ids=["top-k", "top-p", "min-p", "together", "mixed"],
)
def test_kept_ids_and_logprobs_match_transformers(settings: list[Sampling]):
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(len(settings), VOCAB, generator=draw)
        drawn = sample(logits, rows_of(settings, seed=seed))
        for row, (sampling, kept) in enumerate(zip(settings, kept_rows(drawn), strict=True)):
            expected = distribution(logits[row : row + 1], sampling)[0]
            assert kept == torch.isfinite(expected).nonzero().squeeze(-1).tolist()
            token = int(drawn.tokens[row])
            assert token in kept
            assert drawn.logprobs[row].item() == pytest.approx(expected[token].item(), abs=1e-5)


def test_row_without_truncated_ids_has_no_kept_ids():
    logits = torch.zeros(2, VOCAB)
    drawn = sample(logits, rows_of([Sampling(top_k=VOCAB), Sampling(top_p=0.9999999)]))
    assert drawn.kept is not None
    assert drawn.kept.offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_p=0.7),
    ],
    ids=["plain", "cool", "top-k", "top-p"],
)
def test_sample_frequencies_follow_distribution(sampling: Sampling):
    draws, vocab_size = 20_000, 12
    logits = 1.5 * torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3))
    rows = rows_of([sampling], vocab_size=vocab_size)
    keys = torch.tensor([stream_key(11, index) for index in range(draws // 10)])
    many = SamplingBatch(
        temperatures=rows.temperatures.expand(draws),
        top_k=rows.top_k.expand(draws),
        top_p=rows.top_p.expand(draws),
        min_p=rows.min_p.expand(draws),
        keys=keys.repeat(10),
        positions=torch.arange(10).repeat_interleave(draws // 10),
        any_greedy=False,
        all_greedy=False,
        any_truncates=rows.any_truncates,
        num_ordered=rows.num_ordered,
    )
    tokens = sample(logits.expand(draws, -1), many).tokens
    expected = distribution(logits, sampling)[0].exp() * draws
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    deviation = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert deviation < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations


def test_token_with_zero_probability_is_never_sampled():
    logits = torch.full((4000, 9), -torch.inf)
    logits[:, 4] = 0.0
    logits[:, 6] = -80.0  # exp(-80) is lost beside 1 in the cumulated sum
    drawn = sample(logits, rows_of([Sampling()] * 4000, vocab_size=9))
    assert set(drawn.tokens.tolist()) == {4}


def test_smallest_uniform_skips_ids_with_zero_probability():
    rows = rows_of([Sampling()], vocab_size=3)
    smallest = dataclasses.replace(rows, keys=torch.tensor([-0x9E3779B97F4A7C15 + (1 << 64)]))
    assert uniforms(smallest.keys, smallest.positions).item() == 0.0
    logits = torch.tensor([[-torch.inf, 0.0, 0.0]])
    assert sample(logits, smallest).tokens.item() == 1


def test_uniforms_are_splitmix64_in_unit_interval():
    mask = (1 << 64) - 1
    keys = [stream_key(seed, index) for seed in (0, 1, -5, 2**63) for index in (0, 1, 7)]
    positions = [0, 1, 2, 1000, 123_456_789, 2**31]

    def expected(key: int, position: int) -> float:
        x = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return ((x ^ (x >> 31)) >> 11) / 2**53

    for key in keys:
        found = uniforms(torch.full((len(positions),), key), torch.tensor(positions))
        assert found.tolist() == [expected(key, position) for position in positions]


def test_streams_of_neighbouring_seeds_and_indices_are_uncorrelated():
    keys = torch.tensor([stream_key(seed, index) for seed in range(40) for index in range(50)])
    table = uniforms(keys.repeat_interleave(20), torch.arange(20).repeat(2000)).view(2000, 20)
    assert table.min() >= 0
    assert table.max() < 1
    assert len(table.unique()) == table.numel()
    correlations = np.corrcoef(table.numpy().T) - np.eye(20)
    assert np.abs(correlations).max() < 5 / math.sqrt(2000)
    assert abs(table.mean().item() - 0.5) < 5 / math.sqrt(12 * table.numel())
