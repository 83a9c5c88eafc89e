"""Scoring of a group whose episodes finish one by one, with several scorers."""

import asyncio
import gc
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import letter_tokenizer, make_engine
from fakes import Listener, make_chunk, make_completion, make_rollout
from in_process_engine import InProcessEngine
from scripted_scorer import ScriptedScorer, group, settle

from millrace.core.errors import ScoreError
from millrace.core.records import Request, Sampling, ScorerResult, Task, TokenScores
from millrace.environments.function_environment import SingleTurn
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer
from millrace.inference.pool import EnginePool
from millrace.scoring.scheduling.group_scoring import GroupScoring
from millrace.scoring.scheduling.scorer_queue import GroupRef, ScorerQueue, parse_gate
from millrace.scoring.scorer_type import CallSettings


def queue(scorer, *, when=None, **calls):
    gate = None if when is None else parse_gate(when, section="scorer")
    return ScorerQueue(scorer, calls=CallSettings(**calls), gate=gate, warn=pytest.fail)


def scoring(*queues, number=0):
    by_name = {queue.scorer.name: queue for queue in queues}
    ref = GroupRef(order=number, number=number, task=group().task)
    return GroupScoring(by_name, group=ref)


def numbers(columns):
    return [[result.score for result in column] for column in columns]


async def test_episode_is_scored_while_others_of_its_group_are_generating():
    single, whole = ScriptedScorer("single"), ScriptedScorer("whole")
    played = group("a", "bb", "ccc")
    with scoring(queue(single), queue(whole, batch=0)) as session:
        session.add(1, played.episodes[1])
        await settle()
        assert single.calls == [["bb"]]
        assert whole.calls == []
        session.add(0, played.episodes[0])
        session.add(2, played.episodes[2])
        columns = await session.results(played)
    assert numbers(columns) == [[1.0, 2.0, 3.0]] * 2
    assert single.calls == [["bb"], ["a"], ["ccc"]]
    assert whole.calls == [["a", "bb", "ccc"]]


async def test_episodes_that_were_not_added_are_scored_with_the_group():
    single = ScriptedScorer()
    with scoring(queue(single)) as session:
        assert numbers(await session.results(group("a", "bb"))) == [[1.0, 2.0]]


async def test_results_do_not_wait_for_episodes_outside_the_group():
    ranker, judge = ScriptedScorer("ranker"), ScriptedScorer("judge")
    played = group("a", "bb", "ccc")
    kept = replace(played, episodes=(played.episodes[0], played.episodes[2]))
    with scoring(queue(ranker, batch=0), queue(judge, when="ranker > 0")) as session:
        for index, episode in enumerate(played.episodes):
            session.add(index, episode)
        columns = await asyncio.wait_for(session.results(kept), 5)
    assert numbers(columns) == [[1.0, 3.0]] * 2


async def test_a_slow_scorer_delays_only_its_own_groups():
    slow, fast = ScriptedScorer("slow"), ScriptedScorer("fast")
    slow.let.clear()
    both, lone = (queue(slow), queue(fast)), queue(fast)
    with scoring(*both) as waiting, scoring(lone, number=1) as session:
        held = asyncio.create_task(waiting.results(group("a")))
        assert numbers(await session.results(group("bb"))) == [[2.0]]
        assert not held.done()
        slow.let.set()
        assert numbers(await held) == [[1.0], [1.0]]


async def test_gate_passes_each_episode_as_soon_as_its_score_is_known():
    format_, judge = ScriptedScorer("format"), ScriptedScorer("judge")
    judging = queue(judge, when="format >= 2")
    played = group("a", "bb", "ccc")
    with scoring(judging, queue(format_)) as session:
        session.add(2, played.episodes[2])
        await settle()
        assert judge.calls == [["ccc"]]
        columns = await session.results(played)
    assert numbers(columns) == [[None, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert judge.calls == [["ccc"], ["bb"]]
    assert judging.load().skipped == 1


async def test_group_scorer_behind_a_gate_gets_the_passed_episodes_together():
    format_, ranker = ScriptedScorer("format"), ScriptedScorer("ranker")
    with scoring(queue(format_), queue(ranker, when="format < 3", batch=0)) as session:
        columns = await session.results(group("a", "bbb", "cc"))
    assert numbers(columns) == [[1.0, 3.0, 2.0], [1.0, None, 2.0]]
    assert ranker.calls == [["a", "cc"]]


async def test_gates_can_follow_gates_and_group_scorers():
    first, second, third = (ScriptedScorer(name) for name in ("first", "second", "third"))
    with scoring(
        queue(third, when="second > 0"),
        queue(second, when="first > 1"),
        queue(first, batch=0),
    ) as session:
        columns = await session.results(group("a", "bb"))
    assert numbers(columns) == [[None, 2.0], [None, 2.0], [1.0, 2.0]]


async def test_scorer_is_not_called_if_no_episode_passes_its_gate():
    format_, judge = ScriptedScorer("format"), ScriptedScorer("judge")
    with scoring(queue(format_), queue(judge, when="format > 9", batch=0)) as session:
        columns = await session.results(group("a", "b"))
    assert numbers(columns) == [[1.0, 1.0], [None, None]]
    assert judge.calls == []


async def test_failing_scorer_fails_the_group_and_cancels_the_others():
    bad, slow, behind = ScriptedScorer("bad"), ScriptedScorer("slow"), ScriptedScorer("behind")
    bad.fails = lambda group: ScoreError("no")
    slow.let.clear()
    queues = queue(bad), queue(slow), queue(behind, when="slow > 0")
    with scoring(*queues) as session, pytest.raises(ScoreError, match="no"):
        await session.results(group("a", "b"))
    await settle()
    assert slow.num_cancelled == 2
    assert behind.calls == []


async def test_closed_group_withdraws_its_episodes_and_logs_no_error(caplog):
    bad, slow = ScriptedScorer("bad"), ScriptedScorer("slow")
    bad.fails = lambda group: ScoreError("not raised")
    slow.let.clear()
    queues = queue(bad), queue(slow)
    with scoring(*queues) as session:
        session.add(0, group("a").episodes[0])
        await settle()
    await settle()
    del session
    gc.collect()
    assert slow.num_cancelled == 1
    assert queues[1].load().in_flight == 0
    assert caplog.records == []


class EarlyScorer(ScriptedScorer):
    """Also streams the tokens of requests with one completion."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.received = Listener()

    def stream_callback(self, request, *, task):
        return self.received if request.n == 1 else None


async def test_streaming_scorers_receive_tokens_unless_behind_a_gate():
    early, gated = EarlyScorer("early"), EarlyScorer("gated")
    request = Request(id="r", prompt=np.zeros(1, np.int32), sampling=Sampling())
    piece = make_chunk(make_completion("12"))
    with scoring(queue(early), queue(gated, when="early >= 1"), queue(ScriptedScorer())) as s:
        tell = s.stream_callback(request)
        assert tell is not None
        tell(piece)
        assert s.stream_callback(replace(request, n=2)) is None
    assert (early.received.chunks, gated.received.chunks) == ([piece], [])


@pytest.mark.parametrize("raises_at_once", [True, False])
async def test_what_a_streaming_scorer_raises_fails_its_group(raises_at_once):
    class Broken(EarlyScorer):
        def stream_callback(self, request, *, task):
            return fail(request) if raises_at_once else fail

    def fail(given):
        raise KeyError("bug")

    request = Request(id="r", prompt=np.zeros(1, np.int32), sampling=Sampling())
    with (
        scoring(queue(Broken("early"))) as session,
        pytest.raises(ScoreError, match="Scorer 'early' raised KeyError: 'bug'; fix it"),
    ):
        session.stream_callback(request)(make_chunk(make_completion("12")))


async def test_short_completion_is_scored_before_a_long_one_has_finished():
    class Watching(ScriptedScorer):
        async def score(self, group):
            ended.append(playing.done())
            return await super().score(group)

    scorer, ended = Watching(), []
    engine = InProcessEngine(make_engine(max_context=128), receiver=None)  # pyright: ignore
    running = asyncio.create_task(engine.run())
    player = Player(
        environment=SingleTurn(),
        engine=EnginePool([engine]),
        renderer=Renderer(letter_tokenizer()),
        sampling=Sampling(max_new_tokens=100),
        max_context=128,
        seed=0,
    )
    task, attempt = Task(prompt="abcdef"), Attempt(0)
    with scoring(queue(scorer)) as session:
        assert session.takes_episodes
        playing = asyncio.create_task(
            player.play_for_training(task, attempt=attempt, group_size=4, scoring=session)
        )
        played = await playing
        await session.results(played)
    lengths = [rollout.num_sampled for rollout in played.rollouts]
    assert min(lengths) + 20 < max(lengths), "the test needs different lengths"
    assert ended[0] is False
    assert scorer.calls[0] == [played.episodes[lengths.index(min(lengths))].turns[0].completion]
    assert len(scorer.calls) == 4
    running.cancel()


async def test_group_scorers_alone_do_not_take_single_episodes():
    with scoring(queue(ScriptedScorer(), batch=0)) as session:
        assert not session.takes_episodes


class TokenRewarding(ScriptedScorer):
    """Rewards the last token of each rollout by 1."""

    async def score(self, group):
        token_scores = []
        for rollout in group.rollouts:
            rewards = np.zeros(len(rollout.tokens), np.float32)
            rewards[-1] = 1.0
            token_scores.append(TokenScores(rewards=rewards))
        await super().score(group)
        return [ScorerResult(token_scores=tuple(token_scores))]


async def test_token_rewards_are_available_while_others_are_generating():
    queues = (
        queue(TokenRewarding("steps", weight=0.5)),
        queue(TokenRewarding("more", weight=2.0)),
        queue(ScriptedScorer("whole"), batch=0),
        queue(ScriptedScorer("late"), when="whole > 0"),  # its gate needs the whole group
    )
    first, second = make_rollout(), make_rollout(sampled_tokens=2)
    episode = replace(group("a").episodes[0], rollouts=(first, second))
    with scoring(*queues) as session:
        session.add(3, episode)
        rewards = await asyncio.wait_for(session.token_rewards(3), 5)
    assert [each.tolist() for each in rewards] == [[0.0] * 6 + [2.5], [0.0] * 4 + [2.5]]


async def test_token_rewards_raise_the_error_of_a_failing_scorer():
    failing = TokenRewarding("steps")
    failing.fails = lambda group: ScoreError("no")
    with scoring(queue(failing)) as session:
        session.add(0, replace(group("a").episodes[0], rollouts=(make_rollout(),)))
        with pytest.raises(ScoreError, match="no"):
            await session.token_rewards(0)
