"""Chunks and early completions of streaming requests."""

from dataclasses import replace

import numpy as np
import pytest
from engine_rig import Collected, make_engine, make_request, prompt_of
from fakes import Listener

from millrace.core.records import Completion
from millrace.inference.embedded.engine import EmbeddedEngine

PATHS = pytest.mark.parametrize("decode_steps", [1, 4], ids=["steps", "loop"])


def stream_all(engine: EmbeddedEngine, requests) -> dict[str, tuple[Listener, list[Completion]]]:
    """Step until all are finished; as in the worker, chunks come before completions."""
    listeners = {request.id: Listener() for request in requests}
    collected, ended = Collected(), set()
    for request in requests:
        engine.add_request(request, stream=True)
    while engine.has_work:
        finished = engine.step()
        for id, pieces in engine.take_chunks().items():
            assert id not in ended
            for chunk in pieces:
                listeners[id](chunk)
        collected.add(finished)
        ended |= {one.id for one in finished if one.is_last}
    assert not engine.take_chunks()
    done = collected.by_request()
    return {id: (listeners[id], done[id]) for id in done}


@PATHS
def test_each_token_is_streamed_once_despite_preemption(decode_steps):
    engine = make_engine(decode_steps=decode_steps, max_sequences=4, num_blocks=16, eos_ids=(4,))
    sampling = [{}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.5}, {"stop": ("0", "ab")}]
    requests = [
        make_request(str(i), prompt=prompt_of(3 + 4 * i, seed=i), n=3, seed=i, **each)
        for i, each in enumerate(sampling)
    ]
    for listener, completions in stream_all(engine, requests).values():
        listener.assert_received(completions)
    assert engine.stats().preemptions > 0


@PATHS
def test_chunk_with_last_token_has_finish(decode_steps):
    engine = make_engine(decode_steps=decode_steps, eos_ids=(3, 4, 5, 6, 7, 8, 9, 10))
    request = make_request(n=4, seed=1, temperature=2.0)
    engine.add_request(request, stream=True)
    ended: list[set[int]] = []
    while engine.has_work:
        finished = engine.step()
        ended.append({p.member for p in engine.take_chunks().get("r", []) if p.finish is not None})
        if any(one.is_last for one in finished):
            break
    assert set.union(*ended) == {0, 1, 2, 3}
    assert sum(bool(members) for members in ended) > 1


@PATHS
def test_chunks_have_min_chunk_tokens_except_the_last(decode_steps):
    engine = make_engine(decode_steps=decode_steps, eos_ids=())
    request = replace(make_request(n=2, max_new_tokens=11), min_chunk_tokens=4)
    ((listener, completions),) = stream_all(engine, [request]).values()
    listener.assert_received(completions)
    *whole, last = [chunk for chunk in listener.chunks if chunk.member == 0]
    assert whole
    assert all(len(chunk.tokens) >= 4 for chunk in whole)
    assert last.finish == "length"


def test_requests_without_stream_have_no_chunks():
    engine = make_engine()
    engine.add_request(make_request())
    while engine.has_work:
        engine.step()
        assert engine.take_chunks() == {}


def test_chunks_do_not_change_while_decoding_continues():
    engine = make_engine(eos_ids=())
    engine.add_request(make_request(max_new_tokens=3), stream=True)
    engine.step()
    (chunk,) = engine.take_chunks()["r"]
    token = int(chunk.tokens[0])
    engine.abort(["r"])
    engine.take_chunks()
    engine.add_request(make_request("other", seed=9, prompt=2), stream=True)
    engine.step()
    np.testing.assert_array_equal(chunk.tokens, [token])


@PATHS
def test_each_completion_is_returned_once_as_it_ends(decode_steps):
    engine = make_engine(decode_steps=decode_steps)
    # The second completion ends after 4 tokens, the first continues.
    engine.add_request(make_request("r", n=2, seed=1, max_new_tokens=60))
    returned = []
    while engine.has_work:
        returned += engine.step()
    assert [(list(one.completions), one.is_last) for one in returned] == [([1], False), ([0], True)]


@PATHS
def test_coalesced_chunks_come_on_demand_and_not_after_the_end(
    decode_steps,
):
    engine = make_engine(decode_steps=decode_steps, eos_ids=())
    request = replace(make_request(n=2, max_new_tokens=24, top_p=0.9), coalesce=True)
    engine.add_request(request, stream=True)
    listener = Listener()
    for _ in range(2):
        engine.step()
        engine.step()
        for chunk in engine.take_chunks(coalesced=True)["r"]:
            listener(chunk)
        assert not engine.take_chunks(coalesced=True)
    while not (finished := engine.step()):
        pass
    assert not engine.take_chunks()
    assert not engine.take_chunks(coalesced=True)
    (done,) = finished
    for member, completion in done.completions.items():
        chunks = [chunk for chunk in listener.chunks if chunk.member == member]
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        assert 0 < len(tokens) < len(completion.tokens)
        np.testing.assert_array_equal(tokens, completion.tokens[: len(tokens)])
        assert all(chunk.kept is not None for chunk in chunks)
