"""Groups that go on after a crash: what was told is told again, and only the rest is sampled."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import assert_same, finish_all, make_engine, make_request
from fakes import Listener, ScriptedEngine, make_chunk, make_completion
from in_process_engine import InProcessEngine

from millrace.core.staleness import Stamps
from millrace.environments.rollouts.attempt import PartialRollout
from millrace.environments.rollouts.replaying_engine import ReplayingEngine
from millrace.inference.pool import EnginePool
from millrace.journal.encoding import decode_completion, encode_completion

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


async def crash_during(request, *, turns, course=None):
    """What a journal holds of a request whose controller dies after so many passes."""
    course = PartialRollout() if course is None else course
    parts = []
    async with served() as (_, engine):
        asking = asyncio.create_task(ReplayingEngine(engine, course=course).generate(request))
        for _ in range(turns):
            await asyncio.sleep(0)
            for one in course.take():
                part = decode_completion(encode_completion(one.part))
                parts.append(replace(one, part=part))
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
    return parts


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}])
async def test_a_completion_that_goes_on_is_the_one_it_would_have_been(sampling):
    request = make_request("group 0/0", n=3, seed=11, **LONG, **sampling)
    undisturbed = finish_all(make_engine(), [request])[request.id]
    parts = await crash_during(request, turns=25)
    course = PartialRollout(parts)
    async with served() as (engine, serving):
        completions = await ReplayingEngine(serving, course=course).generate(request)
        sampled_again = engine.stats().generated_tokens
    for mine, other in zip(completions, undisturbed, strict=True):
        assert_same(mine, other)
        assert (mine.finish, mine.text) == (other.finish, other.text)
    assert course.num_given > 10
    assert sampled_again == sum(len(one.tokens) for one in undisturbed) - course.num_given


async def test_it_may_crash_again_and_again():
    request = make_request("group 0/0", n=2, seed=5, **LONG)
    undisturbed = finish_all(make_engine(), [request])[request.id]
    parts = await crash_during(request, turns=12)
    for _ in range(3):
        parts += await crash_during(request, turns=12, course=PartialRollout(parts))
    course = PartialRollout(parts)
    async with served() as (_, serving):
        completions = await ReplayingEngine(serving, course=course).generate(request)
    for mine, other in zip(completions, undisturbed, strict=True):
        assert_same(mine, other)
    assert course.num_given > 20


def told_of(request, completions, *, partial=()):
    """The progress of a request whose completions came to this; of those in `partial`, of so many
    tokens."""
    course = PartialRollout()
    asked = course.ask(request)
    for member, completion in enumerate(completions):
        if member in partial:
            asked.hear(make_chunk(completion, member=member))
        else:
            asked.hear_end(member, completion)
    tokens = course.take()
    assert course.take() == []
    return tokens


async def test_what_had_ended_is_told_without_an_engine():
    request = replace(make_request("group 0/0", n=2), expires=True)
    ended = [make_completion("ab"), make_completion("c")]
    course = PartialRollout(told_of(request, ended))
    engine, heard, told = ScriptedEngine("x"), Listener(), {}
    completions = await ReplayingEngine(engine, course=course).generate(
        request, heard, lambda member, completion: told.update({member: completion})
    )
    assert engine.requests == []
    assert [one.text for one in completions] == ["ab", "c"]
    assert {member: one.text for member, one in told.items()} == {0: "ab", 1: "c"}
    heard.assert_heard(completions)
    assert course.given.counts == {0: 3}
    assert course.unasked.num_tokens == 0
    assert course.take() == [], "it is written down already"


async def test_listeners_hear_what_was_told_before_and_then_the_rest():
    request = make_request("group 0/0", n=2, seed=3, **LONG)
    parts = await crash_during(request, turns=20)
    heard = Listener()
    async with served() as (_, serving):
        completions = await ReplayingEngine(serving, course=PartialRollout(parts)).generate(
            request, heard
        )
    heard.assert_heard(completions)


async def test_what_is_too_stale_is_sampled_anew_and_counted():
    request = replace(make_request("group 0/0", n=2), expires=True)
    known = told_of(request, [make_completion("ab", version=1), make_completion("c", version=4)])
    course = PartialRollout(known, is_fit=lambda versions: bool((versions >= 3).all()))
    engine = ScriptedEngine("new")
    completions = await ReplayingEngine(engine, course=course).generate(request)
    assert [one.text for one in completions] == ["new", "c"]
    (again,) = engine.requests
    assert (again.index, again.partial) == (0, None)
    assert course.outdated.counts == {1: 2}
    assert course.given.counts == {4: 1}


async def test_tokens_that_are_never_trained_cannot_be_too_stale():
    request = make_request("group 0/0")
    course = PartialRollout(
        told_of(request, [make_completion("ab")]), is_fit=lambda versions: False
    )
    (completion,) = await ReplayingEngine(ScriptedEngine(), course=course).generate(request)
    assert completion.text == "ab"
    assert course.given.num_tokens == 0
    assert course.num_given == 2


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
async def test_another_question_is_not_answered_with_what_is_known(change):
    request = make_request("group 0/0")
    course = PartialRollout(told_of(request, [make_completion("ab")]))
    engine = ScriptedEngine("new")
    (completion,) = await ReplayingEngine(engine, course=course).generate(
        replace(request, **change)
    )
    assert completion.text == "new"
    assert course.num_given == 0
    assert course.unasked.counts == {0: 2}


async def test_another_model_is_not_answered_with_what_the_policy_said():
    request = make_request("group 0/0")
    course = PartialRollout(told_of(request, [make_completion("ab")]))
    recalled = ReplayingEngine(ScriptedEngine("new"), course=course, model="judge")
    assert (await recalled.generate(request))[0].text == "new"


async def test_what_is_begun_anew_takes_the_place_of_what_was_known():
    request = make_request("group 0/0")
    other = replace(request, prompt=np.array([9], np.int32))
    parts = told_of(request, [make_completion("abc")], partial=[0])
    parts += told_of(other, [make_completion("d")])
    course = PartialRollout(parts)
    engine = ScriptedEngine("new")
    assert (await ReplayingEngine(engine, course=course).generate(other))[0].text == "d"
    assert course.num_given == 1


async def test_a_branch_goes_on_from_more_than_it_began_with():
    begun = replace(make_completion("ab"), finish="interrupt", text="")
    request = replace(make_request("group 0/1.0"), partial=begun)
    course = PartialRollout()
    course.ask(request).hear(make_chunk(make_completion("c")))
    engine, heard = ScriptedEngine("d"), Listener()
    again = PartialRollout(course.take())
    await ReplayingEngine(engine, course=again).generate(request, heard)
    (rest,) = engine.requests
    assert rest.partial.tokens.tolist() == [ord(c) for c in "abc"]
    assert heard.chunks[0].tokens.tolist() == [ord("c")]
    assert again.num_given == 3


async def test_one_that_becomes_too_old_ends_its_siblings():
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
    course = PartialRollout(told_of(request, ended, partial=[1, 2]))
    engine = Held()
    completions = await ReplayingEngine(engine, course=course).generate(request)
    assert [one.finish for one in completions] == ["stop", "expire"]
    assert engine.ended


async def test_what_an_interrupted_engine_had_not_told_is_told_when_it_goes_on_elsewhere():
    """At leisure there may be tokens that only the interrupted answer tells of."""

    class Interrupted(ScriptedEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            self.requests.append(request)
            whole = make_completion("abcde")
            if request.partial is None:
                on_tokens(make_chunk(replace(make_completion("ab"), finish=None)))
                return [replace(make_completion("abcd"), finish="interrupt", text="")]
            on_tokens(make_chunk(make_completion("e")))
            return [whole]

    request, course = make_request("group 0/0"), PartialRollout()
    pool = EnginePool([Interrupted()])
    await ReplayingEngine(pool, course=course).generate(request)
    again = PartialRollout(course.take())
    (known,) = again.ask(request).known
    assert known.text == "abcde"
    assert known.tokens.tolist() == [ord(c) for c in "abcde"]
    assert Stamps.of(known.versions).counts == {0: 5}
