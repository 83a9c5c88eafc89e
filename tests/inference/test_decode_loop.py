"""The decode loop against single steps, token by token."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from architectures import ARCHITECTURES
from engine_rig import (
    LETTERS,
    assert_same,
    finish_all,
    make_engine,
    make_request,
    prompt_of,
    weights,
)

from millrace.core.completions import kept_counts, kept_row
from millrace.core.records import Completion, Request
from millrace.inference.embedded.decode.loop import row_sizes
from millrace.inference.embedded.engine import EmbeddedEngine

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
ADJUSTED = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"logit_bias": ((5, 3.0), (9, -2.0)), "frequency_penalty": -0.5, "top_logprobs": 3},
    {"top_logprobs": 2, "temperature": 0.0},
    {"top_logprobs": 5, "top_k": 6, "presence_penalty": 1.0},
]


def mixed_requests(*, n: int = 2, settings: Sequence[dict[str, Any]] = SETTINGS) -> list[Request]:
    return [
        make_request(str(i), prompt=prompt_of(1 + 5 * i, seed=i), n=n, seed=i, **own)
        for i, own in enumerate(settings)
    ]


def assert_all_same(
    done: dict[str, list[Completion]], expected: dict[str, list[Completion]]
) -> None:
    assert done.keys() == expected.keys()
    for id, completions in expected.items():
        for ours, theirs in zip(done[id], completions, strict=True):
            assert_same(ours, theirs)
            assert (ours.top is None) == (theirs.top is None)
            if ours.top is not None and theirs.top is not None:
                np.testing.assert_array_equal(ours.top.ids, theirs.top.ids)
                np.testing.assert_allclose(ours.top.logprobs, theirs.top.logprobs, atol=3e-5)
            assert (ours.finish, ours.text) == (theirs.finish, theirs.text)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("decode_steps", [2, 7])
def test_decode_loop_matches_single_steps(architecture: str, decode_steps: int):
    requests = mixed_requests()
    engine = make_engine(architecture, eos_ids=(5,), decode_steps=decode_steps)
    expected = finish_all(make_engine(architecture, eos_ids=(5,)), requests)
    assert_all_same(finish_all(engine, requests), expected)
    assert {c.finish for completions in expected.values() for c in completions} == {
        "stop",
        "length",
    }


@pytest.mark.parametrize("settings", [ADJUSTED, [*SETTINGS, *ADJUSTED]], ids=["adjusted", "mixed"])
def test_penalties_biases_and_top_logprobs_match_single_steps(settings: list[dict[str, Any]]):
    requests = mixed_requests(settings=settings)
    expected = finish_all(make_engine(eos_ids=(5,)), requests)
    # Fewer slots than sequences: rows of launches change their owners.
    engine = make_engine(eos_ids=(5,), decode_steps=7, max_sequences=6)
    assert_all_same(finish_all(engine, requests), expected)


@pytest.mark.parametrize("settings", ADJUSTED)
def test_adjusted_sequences_decode_in_launches_of_several_steps(settings: dict[str, Any]):
    engine = make_engine(eos_ids=(), decode_steps=8)
    for request in (make_request("a", **settings), make_request("plain", seed=1)):
        engine.add_request(request)
    engine.step()  # prefill and a launch of four steps: half of eight after an arrival
    assert engine.stats().generated_tokens == 2 * 5


def test_launch_shrinks_and_preempts_when_blocks_run_out():
    requests = mixed_requests()
    engine = make_engine(eos_ids=(), num_blocks=26, prefill_tokens=13, decode_steps=8)
    done = finish_all(engine, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().free_blocks == 26
    assert_all_same(done, finish_all(make_engine(eos_ids=()), requests))


def test_stop_string_within_a_launch_ends_completion_there():
    plain = finish_all(make_engine(eos_ids=()), [make_request("a", seed=3)])["a"][0]
    stop = (plain.text[4:6],)
    request = make_request("a", seed=3, stop=stop)
    done = finish_all(make_engine(eos_ids=(), decode_steps=16), [request])
    assert_all_same(done, finish_all(make_engine(eos_ids=()), [request]))
    assert done["a"][0].finish == "stop"
    assert len(done["a"][0].tokens) < 16
    assert all(character in LETTERS for character in done["a"][0].text)


def test_kept_ids_beyond_capacity_are_recorded_as_masks():
    requests = [make_request("wide", top_p=0.98), make_request("plain", seed=1)]
    engine = make_engine(eos_ids=(), decode_steps=4, kept_capacity=3)
    done = finish_all(engine, requests)
    expected = finish_all(make_engine(eos_ids=()), requests)
    kept, listed = done["wide"][0].kept, expected["wide"][0].kept
    assert kept is not None
    assert listed is not None
    assert (kept.ids < 0).any()
    assert kept_counts(kept).max() > 3
    assert kept_counts(kept).tolist() == kept_counts(listed).tolist()
    for row in range(len(kept_counts(kept))):
        assert kept_row(kept, row).tolist() == kept_row(listed, row).tolist()
    assert_all_same({"plain": done["plain"]}, {"plain": expected["plain"]})
    assert done["wide"][0].tokens.tolist() == expected["wide"][0].tokens.tolist()


def test_swap_lands_between_two_launches():
    engine = make_engine(eos_ids=(), decode_steps=8)
    engine.add_request(make_request("a"))
    engine.step()  # prefill and a launch of four steps: half of eight after an arrival
    engine.swap(weights(seed=7), version=1)
    (completion,) = finish_all(engine)["a"]
    assert completion.versions.tolist() == [0] * 5 + [1] * 11


def test_new_weights_reach_fused_projections():
    engine = make_engine(eos_ids=(), decode_steps=4)
    engine.swap(weights(seed=7), version=1)
    expected = finish_all(make_engine(eos_ids=(), seed=7), [make_request("a")])
    done = finish_all(engine, [make_request("a")])
    assert_all_same(done, expected)
    assert engine.parameter_shapes() == make_engine().parameter_shapes()


def test_warm_up_has_no_visible_effect():
    engine = make_engine(decode_steps=4)
    engine.warm_up()
    stats = engine.stats()
    assert (stats.generated_tokens, stats.prefill_tokens, stats.free_blocks) == (0, 0, 256)


@pytest.mark.parametrize("max_rows", [1, 8, 9, 64, 200, 256, 1000])
def test_row_sizes_cover_all_batches_with_little_padding(max_rows: int):
    sizes = row_sizes(max_rows)
    assert sizes[-2] < max_rows <= sizes[-1] if len(sizes) > 1 else max_rows <= sizes[0]
    assert all(
        larger - smaller <= max(8, smaller // 2) for smaller, larger in itertools.pairwise(sizes)
    )


def prepared_rows(engine: EmbeddedEngine) -> list[int]:
    """The rows of the plain steps that the loop has, which on a GPU are captured."""
    assert engine._decode_loop is not None
    return sorted(shape.num_rows for shape in engine._decode_loop._steps if not shape.truncates)


def truncating_rows(engine: EmbeddedEngine) -> list[int]:
    assert engine._decode_loop is not None
    return sorted(shape.num_rows for shape in engine._decode_loop._steps if shape.truncates)


def short_requests(count: int, **sampling: Any) -> list[Request]:
    settings = {"max_new_tokens": 12, **sampling}
    return [make_request(str(i), seed=i, **settings) for i in range(count)]


SIZES = {"decode_steps": 4, "max_sequences": 50, "num_blocks": 1024, "prefill_tokens": 256}
RARE: dict[str, Any] = {"eos_ids": (), **SIZES, "defers_captures": True}


def test_launch_of_a_rare_shape_has_more_rows_until_the_engine_is_idle():
    requests = short_requests(20)  # fit into 24 rows
    engine = make_engine(**RARE)
    engine.warm_up()
    assert prepared_rows(engine) == [8, 16, 32, 64]
    done = finish_all(engine, requests)
    assert prepared_rows(engine) == [8, 16, 32, 64]
    for _ in range(2):  # one shape at a time
        engine.use_idle_time()
        assert prepared_rows(engine) == [8, 16, 24, 32, 64]
    again = finish_all(engine, requests)
    assert prepared_rows(engine) == [8, 16, 24, 32, 64]
    expected = finish_all(make_engine(eos_ids=()), requests)
    for found in (done, again):
        assert_all_same(found, expected)


def test_rare_shape_is_captured_at_once_if_no_shape_of_about_its_size_was():
    engine = make_engine(**RARE)
    engine.warm_up()
    finish_all(engine, [make_request("one", top_k=5, max_new_tokens=3)])
    assert truncating_rows(engine) == [8]
    for request in short_requests(20, top_k=5):
        engine.add_request(request)
    engine.step()
    assert truncating_rows(engine) == [8, 24]


def test_capture_does_not_wait_forever_if_the_engine_is_never_idle():
    engine = make_engine(**RARE)
    engine.warm_up()
    for request in short_requests(20, max_new_tokens=100):
        engine.add_request(request)
    num_launches = 0
    while 24 not in prepared_rows(engine):
        engine.step()
        num_launches += 1
        assert engine.stats().running == 20
    assert num_launches == 17


def test_every_shape_that_a_launch_needs_is_captured_unless_captures_are_deferred():
    engine = make_engine(**{**RARE, "defers_captures": False})
    engine.warm_up()
    for request in short_requests(20):
        engine.add_request(request)
    engine.step()
    assert prepared_rows(engine) == [8, 16, 24, 32, 64]


def test_launch_ends_early_on_should_stop():
    engine = make_engine(eos_ids=(), decode_steps=32)
    engine.add_request(make_request("a", max_new_tokens=30))
    engine.step(should_stop=lambda: True)
    assert 1 < engine.stats().generated_tokens < 30
    done = finish_all(engine)
    assert_all_same(
        done, finish_all(make_engine(eos_ids=()), [make_request("a", max_new_tokens=30)])
    )
