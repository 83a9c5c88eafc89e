import asyncio
from dataclasses import replace

import pytest
from fakes import CharacterTokenizer, FakeScoring, Listener, ScriptedEngine, make_completion

from millrace.core.errors import TaskError
from millrace.core.records import Sampling, Task
from millrace.environments.function_environment import SingleTurn
from millrace.environments.rollouts.partial_rollouts import Attempt, Expired
from millrace.environments.rollouts.player import Player, group_seed
from millrace.environments.rollouts.renderer import Renderer


def make_player(engine, *, max_context=100, **sampling):
    return Player(
        environment=SingleTurn(),
        engine=engine,
        renderer=Renderer(CharacterTokenizer()),
        sampling=Sampling(**sampling),
        max_context=max_context,
        seed=7,
    )


async def test_a_group_is_one_request_of_n_completions_that_share_the_prompt():
    engine = ScriptedEngine("12", "3")
    group = await make_player(engine).play_for_training(
        Task(prompt="1+2="), attempt=Attempt(5), group_size=4
    )
    (request,) = engine.requests
    assert request.n == 4
    assert [e.turns[0].completion for e in group.episodes] == ["12", "3", "12", "3"]
    assert group.rollouts[0].tokens.tolist() == [ord(c) for c in "1+2=12"]
    assert group.rollouts[0].mask.tolist() == [False] * 4 + [True] * 2


async def test_seeds_depend_only_on_the_run_and_the_group():
    first, again = ScriptedEngine("1"), ScriptedEngine("1")
    for engine in (first, again):
        for number in (0, 1):
            await make_player(engine).play_for_training(
                Task(prompt="x"), attempt=Attempt(number), group_size=2
            )
    assert [r.seed for r in first.requests] == [r.seed for r in again.requests]
    assert first.requests[0].seed != first.requests[1].seed
    assert 0 <= group_seed(-3, 10**12) < 2**63


async def test_prompt_that_fills_the_context_raises_task_error_with_sizes():
    with pytest.raises(TaskError, match=r"8 tokens, but the context holds 8.*engine.max_context"):
        await make_player(ScriptedEngine("1"), max_context=8).play_for_training(
            Task(prompt="12345678"), attempt=Attempt(0), group_size=2
        )


async def test_greedy_evaluation_disables_temperature_and_truncation():
    engine = ScriptedEngine("1")
    player = make_player(engine, temperature=0.7, top_k=5, top_p=0.9, stop=("\n",))
    greedy = player.evaluating(engine=engine, temperature=0.0)
    await greedy.play_for_evaluation(Task(prompt="x"), number=0, group_size=1, name="evaluation")
    sampling = engine.requests[0].sampling
    assert sampling.temperature == 0
    assert not sampling.truncates
    assert sampling.stop == ("\n",)


async def test_evaluation_samples_on_its_own_engines():
    engine, evaluator = ScriptedEngine("1"), ScriptedEngine("2")
    player = make_player(engine, temperature=0.7, max_new_tokens=9)
    sampling = player.evaluating(engine=evaluator, temperature=0.6)
    group = await sampling.play_for_evaluation(
        Task(prompt="x"), number=3, group_size=4, name="evaluation"
    )
    assert len(group.episodes) == 4
    assert engine.requests == []
    (request,) = evaluator.requests
    assert request.sampling == Sampling(temperature=0.6, max_new_tokens=9)


async def test_each_try_at_a_group_has_its_own_seed_and_name():
    engine = ScriptedEngine("1")
    for tries in range(3):
        attempt = Attempt(4, tries=tries)
        await make_player(engine).play_for_training(Task(prompt="x"), attempt=attempt, group_size=2)
    assert [r.id for r in engine.requests] == ["group 4/0", "group 4, try 2/0", "group 4, try 3/0"]
    assert len({r.seed for r in engine.requests}) == 3
    assert engine.requests[0].seed == group_seed(7, 4)


async def test_training_requests_expire_and_evaluation_requests_do_not():
    engine = ScriptedEngine("1")
    player = make_player(engine)
    await player.play_for_training(Task(prompt="x"), attempt=Attempt(0), group_size=2)
    greedy = player.evaluating(engine=engine, temperature=0.0)
    await greedy.play_for_evaluation(Task(prompt="x"), number=0, group_size=1, name="evaluation")
    assert [request.expires for request in engine.requests] == [True, False]


async def test_expired_group_ends_and_counts_its_tokens():
    class Expiring(ScriptedEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            done, cut = await super().generate(request, on_tokens)
            return [done, replace(cut, finish="expire")]

    attempt = Attempt(0)
    with pytest.raises(Expired):
        await make_player(Expiring("abc", "de")).play_for_training(
            Task(prompt="x"), attempt=attempt, group_size=2
        )
    assert (attempt.finished, attempt.cut, attempt.token_versions.counts) == ([3], [2], {0: 5})


async def test_scoring_receives_streamed_tokens_of_training_groups_only():
    engine, listener = ScriptedEngine("12", "3"), Listener()
    player = make_player(engine)
    asked = []

    def stream_callback(request):
        asked.append(request)
        return listener if len(asked) == 1 else None

    for number in (5, 6):
        attempt = Attempt(number)
        await player.play_for_training(
            Task(prompt="x"),
            attempt=attempt,
            group_size=2,
            scoring=FakeScoring(stream_callback=stream_callback),
        )
    await player.play_for_evaluation(Task(prompt="x"), number=0, group_size=1, name="evaluation")
    assert [request.id for request in asked] == [r.id for r in engine.requests[:2]]
    assert [request.min_chunk_tokens > 1 for request in engine.requests] == [True, False, False]
    listener.assert_received([make_completion("12"), make_completion("3")])


class Ending(ScriptedEngine):
    """Finish its completions one by one, each when the test allows it."""

    def __init__(self, *completions):
        super().__init__()
        self.completions = completions
        self.may_end = [asyncio.Event() for _ in completions]

    async def generate(self, request, on_tokens=None, on_completion=None):
        self.requests.append(request)
        for member in reversed(range(request.n)):
            await self.may_end[member].wait()
            if on_completion is not None:
                on_completion(member, self.completions[member])
        return list(self.completions)


async def test_finished_episode_is_added_to_scoring_at_once_and_only_once():
    engine, scoring = Ending(make_completion("long one"), make_completion("1")), FakeScoring()
    playing = asyncio.create_task(
        make_player(engine).play_for_training(
            Task(prompt="x"),
            attempt=Attempt(0),
            group_size=2,
            scoring=scoring,
        )
    )
    engine.may_end[1].set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert list(scoring.added) == [1]
    assert not playing.done()
    engine.may_end[0].set()
    group = await playing
    assert list(scoring.added.items()) == [(1, group.episodes[1]), (0, group.episodes[0])]


async def test_aborted_completion_is_not_added_to_scoring():
    cut = replace(make_completion("de"), finish="expire")
    engine, scoring = Ending(make_completion("abc"), cut), FakeScoring()
    for event in engine.may_end:
        event.set()
    with pytest.raises(Expired):
        await make_player(engine).play_for_training(
            Task(prompt="x"),
            attempt=Attempt(0),
            group_size=2,
            scoring=scoring,
        )
    assert list(scoring.added) == [0]
