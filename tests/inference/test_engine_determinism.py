"""A completion depends on (seed, completion index, position) and on nothing around it."""

import numpy as np
import torch
from architectures import tiny_model
from engine_rig import (
    assert_same,
    distribution,
    finish_all,
    make_engine,
    make_request,
    plain_logits,
    prompt_of,
)

from millrace.core.records import Completion, Request
from millrace.inference.embedded.sampler import stream_key, uniforms


def crowd(*, count: int = 12) -> list[Request]:
    return [
        make_request(f"mate-{i}", prompt=prompt_of(2 + 3 * i, seed=50 + i), seed=100 + i, n=2)
        for i in range(count)
    ]


def alone(request: Request) -> list[Completion]:
    return finish_all(make_engine(), [request])[request.id]


def test_completion_does_not_depend_on_its_batch():
    request = make_request(seed=3, n=3, temperature=1.2)
    expected = alone(request)
    mates = crowd()
    done = finish_all(make_engine(max_sequences=7), [*mates[:6], request, *mates[6:]])
    for completion, same in zip(done["r"], expected, strict=True):
        assert_same(completion, same)


def test_completion_does_not_depend_on_preemption():
    mates = crowd()
    roomy = finish_all(make_engine(max_sequences=32, num_blocks=512), mates)
    engine = make_engine(num_blocks=20, prefill_tokens=10)
    tight = finish_all(engine, mates)
    assert engine.stats().preemptions > 0
    for id, completions in roomy.items():
        for completion, same in zip(tight[id], completions, strict=True):
            assert_same(completion, same)


def test_group_members_differ_and_match_single_requests_with_their_index():
    group = alone(make_request(n=4, seed=9, max_new_tokens=12))
    assert len({completion.tokens.tobytes() for completion in group}) == 4
    for index, member in enumerate(group):
        single = make_request("single", seed=9, max_new_tokens=12)
        request = Request(
            id="single", prompt=single.prompt, sampling=single.sampling, seed=9, index=index
        )
        assert_same(alone(request)[0], member)


def test_different_seeds_give_different_completions():
    tokens = {alone(make_request(seed=seed))[0].tokens.tobytes() for seed in range(8)}
    assert len(tokens) == 8


def test_same_request_gives_the_same_completion():
    request = make_request(seed=-1, top_p=0.9)
    np.testing.assert_array_equal(alone(request)[0].tokens, alone(request)[0].tokens)


def test_token_is_inverse_cdf_at_uniform_of_seed_index_and_position():
    model = tiny_model("qwen3")
    for length in (4, 11):
        request = make_request(prompt=length, n=2, seed=6, temperature=1.3, top_p=0.9)
        for index, completion in enumerate(alone(request)):
            positions = torch.arange(len(completion.tokens))
            draws = uniforms(torch.full_like(positions, stream_key(6, index)), positions)
            logits = plain_logits(model, request.prompt, completion)
            cdf = distribution(logits, request.sampling).double().exp().cumsum(-1)
            expected = torch.searchsorted(cdf, draws[:, None], right=True).squeeze(-1)
            np.testing.assert_array_equal(completion.tokens, expected)
