"""What an engine tells of requests that stream, between two steps."""

from dataclasses import replace

import numpy as np
import pytest
from engine_rig import make_engine, make_request, prompt_of
from fakes import Listener

from millrace.core.records import Completion
from millrace.inference.embedded.engine import EmbeddedEngine

PATHS = pytest.mark.parametrize("round_steps", [1, 4], ids=["steps", "rounds"])


def stream_all(engine: EmbeddedEngine, requests) -> dict[str, tuple[Listener, list[Completion]]]:
    """Step until all are finished; as the worker, hear the news before the end."""
    heard = {request.id: Listener() for request in requests}
    done = {}
    for request in requests:
        engine.add_request(request, stream=True)
    while engine.has_work:
        finished = engine.step()
        for id, pieces in engine.take_chunks().items():
            assert id not in done
            for piece in pieces:
                heard[id](piece)
        done |= {request.id: request.completions for request in finished}
    assert not engine.take_chunks()
    return {id: (heard[id], done[id]) for id in done}


@PATHS
def test_nothing_is_told_twice_or_lost_while_sequences_wait_and_are_preempted(round_steps):
    engine = make_engine(round_steps=round_steps, max_sequences=4, num_blocks=16, eos_ids=(4,))
    sampling = [{}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.5}, {"stop": ("0", "ab")}]
    requests = [
        make_request(str(i), prompt=prompt_of(3 + 4 * i, seed=i), n=3, seed=i, **each)
        for i, each in enumerate(sampling)
    ]
    for listener, completions in stream_all(engine, requests).values():
        listener.assert_heard(completions)
    assert engine.stats().preemptions > 0


@PATHS
def test_a_completion_that_ends_before_its_siblings_is_known_to_have_ended(round_steps):
    engine = make_engine(round_steps=round_steps, eos_ids=(3, 4, 5, 6, 7, 8, 9, 10))
    request = make_request(n=4, seed=1, temperature=2.0)
    engine.add_request(request, stream=True)
    ended: list[set[int]] = []
    while engine.has_work:
        finished = engine.step()
        ended.append({p.member for p in engine.take_chunks().get("r", []) if p.finish is not None})
        if finished:
            break
    assert set.union(*ended) == {0, 1, 2, 3}
    assert sum(bool(members) for members in ended) > 1


@PATHS
def test_pieces_are_at_least_as_long_as_the_request_wants_but_for_the_last(round_steps):
    engine = make_engine(round_steps=round_steps, eos_ids=())
    request = replace(make_request(n=2, max_new_tokens=11), min_chunk_tokens=4)
    ((listener, completions),) = stream_all(engine, [request]).values()
    listener.assert_heard(completions)
    *whole, last = [piece for piece in listener.chunks if piece.member == 0]
    assert whole
    assert all(len(piece.tokens) >= 4 for piece in whole)
    assert last.finish == "length"


def test_of_requests_that_do_not_stream_nothing_is_told():
    engine = make_engine()
    engine.add_request(make_request())
    while engine.has_work:
        engine.step()
        assert engine.take_chunks() == {}


def test_what_was_told_does_not_change_while_its_lane_goes_on():
    engine = make_engine(eos_ids=())
    engine.add_request(make_request(max_new_tokens=3), stream=True)
    engine.step()
    (piece,) = engine.take_chunks()["r"]
    token = int(piece.tokens[0])
    engine.abort(["r"])
    engine.take_chunks()
    engine.add_request(make_request("other", seed=9, prompt=2), stream=True)
    engine.step()
    np.testing.assert_array_equal(piece.tokens, [token])


@PATHS
def test_completions_wanted_singly_are_handed_out_as_they_end_and_no_others(round_steps):
    engine = make_engine(round_steps=round_steps)
    # The second of these ends after 4 tokens, the first goes on.
    wanted = make_request("wanted", n=2, seed=1, max_new_tokens=60)
    engine.add_request(wanted, per_completion=True)
    engine.add_request(make_request("other", n=2, seed=1, max_new_tokens=60))
    finished, singles = {}, []
    while engine.has_work:
        finished |= {request.id: request for request in engine.step()}
        singles += [(id, ended, id in finished) for id, ended in engine.take_completions().items()]
    ((id, ended, was_finished),) = singles
    assert (id, list(ended), was_finished) == ("wanted", [1], False)
    assert finished["wanted"].completions[1] is ended[1]
    assert (finished["wanted"].delivered, finished["other"].delivered) == ({1}, frozenset())


@PATHS
def test_at_leisure_is_told_what_is_new_when_that_is_asked_and_nothing_once_all_have_ended(
    round_steps,
):
    engine = make_engine(round_steps=round_steps, eos_ids=())
    request = replace(make_request(n=2, max_new_tokens=24, top_p=0.9), coalesce=True)
    engine.add_request(request, stream=True)
    listener = Listener()
    for _ in range(2):
        engine.step()
        engine.step()
        for piece in engine.take_coalesced_chunks()["r"]:
            listener(piece)
        assert not engine.take_coalesced_chunks()
    while not (finished := engine.step()):
        pass
    assert not engine.take_chunks()
    assert not engine.take_coalesced_chunks()
    (done,) = finished
    for member, completion in enumerate(done.completions):
        told = [piece for piece in listener.chunks if piece.member == member]
        tokens = np.concatenate([piece.tokens for piece in told])
        assert 0 < len(tokens) < len(completion.tokens)
        np.testing.assert_array_equal(tokens, completion.tokens[: len(tokens)])
        assert all(piece.kept is not None for piece in told)
