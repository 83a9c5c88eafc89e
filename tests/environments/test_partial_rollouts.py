"""Groups that resume after a crash: saved tokens are reused, and only the rest is sampled."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import assert_same, finish_all, make_engine, make_request
from fakes import Listener, ScriptedEngine, make_chunk, make_completion
from in_process_engine import InProcessEngine

from millrace.core.staleness import TokenVersions
from millrace.environments.rollouts.partial_rollouts import PartialRollout, ReplayingEngine
from millrace.inference.pool import EnginePool
from millrace.journal.database import decode_completion, encode_completion

LONG = {"max_new_tokens": 40}


@asynccontextmanager
async def served(**settings):
    """A real engine on this loop."""
    engine = make_engine(**settings)
    serving = InProcessEngine(engine, receiver=None)
    running = asyncio.create_task(serving.run())
    try:
        yield engine, serving
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def crash_during(request, *, turns, partial=None):
    """The saved tokens of a request whose controller dies after so many passes."""
    partial = PartialRollout() if partial is None else partial
    parts = []
    async with served() as (_, engine):
        asking = asyncio.create_task(ReplayingEngine(engine, partial=partial).generate(request))
        for _ in range(turns):
            await asyncio.sleep(0)
            for one in partial.take_new():
                part = decode_completion(encode_completion(one.part))
                parts.append(replace(one, part=part))
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
    return parts


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}])
async def test_a_resumed_completion_equals_the_undisturbed_one(sampling):
    request = make_request("group 0/0", n=3, seed=11, **LONG, **sampling)
    undisturbed = finish_all(make_engine(), [request])[request.id]
    parts = await crash_during(request, turns=25)
    partial = PartialRollout(parts)
    async with served() as (engine, serving):
        completions = await ReplayingEngine(serving, partial=partial).generate(request)
        sampled_again = engine.stats().generated_tokens
    for mine, other in zip(completions, undisturbed, strict=True):
        assert_same(mine, other)
        assert (mine.finish, mine.text) == (other.finish, other.text)
    assert partial.num_resumed > 10
    assert sampled_again == sum(len(one.tokens) for one in undisturbed) - partial.num_resumed


async def test_a_completion_survives_several_crashes():
    request = make_request("group 0/0", n=2, seed=5, **LONG)
    undisturbed = finish_all(make_engine(), [request])[request.id]
    parts = await crash_during(request, turns=12)
    for _ in range(3):
        parts += await crash_during(request, turns=12, partial=PartialRollout(parts))
    partial = PartialRollout(parts)
    async with served() as (_, serving):
        completions = await ReplayingEngine(serving, partial=partial).generate(request)
    for mine, other in zip(completions, undisturbed, strict=True):
        assert_same(mine, other)
    assert partial.num_resumed > 20


def saved_of(request, completions, *, unfinished=()):
    """The saved tokens of a request with these completions, some of which have not ended."""
    partial = PartialRollout()
    log = partial.log(request)
    for member, completion in enumerate(completions):
        if member in unfinished:
            log.append(make_chunk(completion, member=member))
        else:
            log.finish(member, completion)
    tokens = partial.take_new()
    assert partial.take_new() == []
    return tokens


async def test_completions_that_had_ended_need_no_engine():
    request = replace(make_request("group 0/0", n=2), expires=True)
    ended = [make_completion("ab"), make_completion("c")]
    partial = PartialRollout(saved_of(request, ended))
    engine, heard, ended_early = ScriptedEngine("x"), Listener(), {}
    completions = await ReplayingEngine(engine, partial=partial).generate(
        request, heard, lambda member, completion: ended_early.update({member: completion})
    )
    assert engine.requests == []
    assert [one.text for one in completions] == ["ab", "c"]
    assert {member: one.text for member, one in ended_early.items()} == {0: "ab", 1: "c"}
    heard.assert_received(completions)
    assert partial.resumed.counts == {0: 3}
    assert partial.unused.num_tokens == 0
    assert partial.take_new() == [], "its tokens are saved already"


async def test_callers_receive_the_saved_tokens_and_then_the_rest():
    request = make_request("group 0/0", n=2, seed=3, **LONG)
    parts = await crash_during(request, turns=20)
    heard = Listener()
    async with served() as (_, serving):
        completions = await ReplayingEngine(serving, partial=PartialRollout(parts)).generate(
            request, heard
        )
    heard.assert_received(completions)


async def test_saved_tokens_that_are_too_stale_are_sampled_again_and_counted():
    request = replace(make_request("group 0/0", n=2), expires=True)
    known = saved_of(request, [make_completion("ab", version=1), make_completion("c", version=4)])
    partial = PartialRollout(known, is_trainable=lambda token_versions: token_versions.oldest >= 3)
    engine = ScriptedEngine("new")
    completions = await ReplayingEngine(engine, partial=partial).generate(request)
    assert [one.text for one in completions] == ["new", "c"]
    (again,) = engine.requests
    assert (again.index, again.partial) == (0, None)
    assert partial.stale.counts == {1: 2}
    assert partial.resumed.counts == {4: 1}


async def test_tokens_that_are_never_trained_cannot_be_too_stale():
    request = make_request("group 0/0")
    partial = PartialRollout(
        saved_of(request, [make_completion("ab")]), is_trainable=lambda token_versions: False
    )
    (completion,) = await ReplayingEngine(ScriptedEngine(), partial=partial).generate(request)
    assert completion.text == "ab"
    assert partial.resumed.num_tokens == 0
    assert partial.num_resumed == 2


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": np.array([9], np.int32)},
        {"sampling": make_request(temperature=0.5).sampling},
        {"seed": 1},
        {"adapter": "other"},
        {"partial": make_completion("y")},
        {"id": "group 0, try 2/0"},
    ],
)
async def test_a_different_request_is_not_answered_from_saved_tokens(change):
    request = make_request("group 0/0")
    partial = PartialRollout(saved_of(request, [make_completion("ab")]))
    engine = ScriptedEngine("new")
    (completion,) = await ReplayingEngine(engine, partial=partial).generate(
        replace(request, **change)
    )
    assert completion.text == "new"
    assert partial.num_resumed == 0
    assert partial.unused.counts == {0: 2}


async def test_saved_tokens_of_the_policy_do_not_answer_for_another_model():
    request = make_request("group 0/0")
    partial = PartialRollout(saved_of(request, [make_completion("ab")]))
    replaying = ReplayingEngine(ScriptedEngine("new"), partial=partial, model="judge")
    assert (await replaying.generate(request))[0].text == "new"


async def test_tokens_sampled_again_replace_the_saved_ones():
    request = make_request("group 0/0")
    other = replace(request, prompt=np.array([9], np.int32))
    parts = saved_of(request, [make_completion("abc")], unfinished=[0])
    parts += saved_of(other, [make_completion("d")])
    partial = PartialRollout(parts)
    engine = ScriptedEngine("new")
    assert (await ReplayingEngine(engine, partial=partial).generate(other))[0].text == "d"
    assert partial.num_resumed == 1


async def test_a_branch_resumes_after_its_saved_tokens_not_after_its_partial():
    begun = replace(make_completion("ab"), finish="interrupt", text="")
    request = replace(make_request("group 0/1.0"), partial=begun)
    partial = PartialRollout()
    partial.log(request).append(make_chunk(make_completion("c")))
    engine, heard = ScriptedEngine("d"), Listener()
    again = PartialRollout(partial.take_new())
    await ReplayingEngine(engine, partial=again).generate(request, heard)
    (rest,) = engine.requests
    assert rest.partial.tokens.tolist() == [ord(c) for c in "abc"]
    assert heard.chunks[0].tokens.tolist() == [ord("c")]
    assert again.num_resumed == 3


async def test_a_completion_that_becomes_too_stale_cancels_its_siblings():
    class Held(ScriptedEngine):
        """Expires the second completion; the third never ends."""

        ended = False

        async def generate(self, request, on_tokens=None, on_completion=None):
            if request.index == 1:
                return [replace(make_completion("old"), finish="expire")]
            try:
                return await asyncio.Event().wait()
            finally:
                self.ended = True

    request = replace(make_request("group 0/0", n=3), expires=True)
    ended = [make_completion("a"), make_completion("b"), make_completion("c")]
    partial = PartialRollout(saved_of(request, ended, unfinished=[1, 2]))
    engine = Held()
    completions = await ReplayingEngine(engine, partial=partial).generate(request)
    assert [one.finish for one in completions] == ["stop", "expire"]
    assert engine.ended


async def test_tokens_that_an_interrupted_engine_did_not_stream_are_saved_when_another_resumes():
    """Coalesced streaming may leave tokens to the interrupted answer."""

    class Interrupted(ScriptedEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            self.requests.append(request)
            whole = make_completion("abcde")
            if request.partial is None:
                on_tokens(make_chunk(replace(make_completion("ab"), finish=None)))
                return [replace(make_completion("abcd"), finish="interrupt", text="")]
            on_tokens(make_chunk(make_completion("e")))
            return [whole]

    request, partial = make_request("group 0/0"), PartialRollout()
    pool = EnginePool([Interrupted()])
    await ReplayingEngine(pool, partial=partial).generate(request)
    again = PartialRollout(partial.take_new())
    (known,) = again.log(request).known
    assert known.text == "abcde"
    assert known.tokens.tolist() == [ord(c) for c in "abcde"]
    assert TokenVersions.of(known.versions).counts == {0: 5}
