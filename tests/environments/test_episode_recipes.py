"""Trees of episodes: shared tokens, trained tokens, and their cost."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of, user
from fakes import FakeScoring
from in_process_engine import InProcessEngine
from talking_model import BLOCK, assert_says_the_same, make_engine, make_trainer

from millrace.config import load_config
from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Completion, Group, Sampling, Task, TokenLogprobs
from millrace.environments.branching import Pivot, Tree, build_recipe
from millrace.environments.function_environment import FunctionEnvironment, answer
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.rollouts.player import Player
from millrace.environments.rollouts.renderer import Renderer, role_model
from millrace.run.environment import resolve_recipe
from millrace.scoring.advantages import TreeAdvantages, with_advantages
from millrace.scoring.pool import combine, function_scorer
from millrace.training.packing.packer import pack

TASK = Task(prompt="a")
TOKENIZER = TOKENIZERS["chatml"]


class BranchingEngine(ChatEngine):
    """Ten tokens after any prompt, the fourth of which is the least likely. It resumes
    partials."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")
        self._rng = np.random.default_rng(0)

    async def generate(self, request, on_tokens=None, on_completion=None):
        self.requests.append(request)
        await asyncio.sleep(0)
        tokens = self._rng.integers(5, 60, 10).astype(np.int32)
        if request.partial is not None:
            tokens[: len(request.partial.tokens)] = request.partial.tokens
        logprobs = np.full(10, -0.5, np.float32)
        logprobs[3] = -4.0
        return [
            Completion(
                tokens=tokens,
                logprobs=logprobs,
                versions=np.zeros(10, np.int32),
                finish="length",
                text=TOKENIZER.decode(tokens),
            )
        ]


async def two_turns(task, agent):
    """Play two turns with prompts from agent.rng."""
    messages = [user(f"{task.prompt} {agent.rng.integers(1000)}")]
    reply = await agent.chat(messages)
    await agent.chat([*messages, reply, user(f"and {agent.rng.integers(1000)}")])
    return float(agent.rng.random())


def with_recipe(player: Player, recipe) -> Player:
    environment = player.environment
    assert isinstance(environment, FunctionEnvironment)
    return replace(player, environment=replace(environment, recipe=recipe))


async def grown(
    function, recipe, engine, *, thread, group_size: int, token_rewards=None, **settings
) -> Group:
    player = with_recipe(player_of(function, engine, thread=thread, **settings), recipe)
    return await player.play_for_training(
        TASK,
        attempt=Attempt(3),
        group_size=group_size,
        scoring=token_rewards and FakeScoring(token_rewards=token_rewards),
    )


def trained_once(group: Group) -> None:
    """Every sampled token is trained in the episode that sampled it, and in no other."""
    by_number = {episode.branching.number: episode for episode in group.episodes}
    for episode in group.episodes:
        own = np.concatenate([r.places[r.mask] for r in episode.rollouts])
        assert len(set(own.tolist())) == len(own)
        origin = episode.branching
        assert own.min() == (0 if origin.parent is None else origin.place)
        if origin.parent is None:
            continue
        parent = by_number[origin.parent]
        for mine, theirs in zip(episode.rollouts, parent.rollouts, strict=False):
            shared = (mine.places >= 0) & (mine.places < origin.place)
            count = int(shared.sum())
            assert not mine.mask[shared].any()
            their = (theirs.places >= 0) & (theirs.places < origin.place)
            np.testing.assert_array_equal(mine.tokens[shared], theirs.tokens[their][:count])


async def test_pivot_by_surprisal_branches_at_the_least_likely_token(thread):
    engine = BranchingEngine()
    group = await grown(answer, Pivot(branches=3), engine, thread=thread, group_size=9)
    assert [e.branching.parent for e in group.episodes].count(None) == 2 + 1
    for episode in group.episodes:
        if episode.branching.parent is not None:
            assert episode.branching.place == 3
            (rollout,) = episode.rollouts
            assert rollout.num_sampled == 7
    trained_once(group)
    branches = [request for request in engine.requests if request.partial is not None]
    assert len(branches) == 6
    assert all(len(request.partial.tokens) == 3 and request.pinned for request in branches)
    assert len({(request.seed, request.index) for request in branches}) == 6
    assert len({request.session for request in branches}) == 2  # that of their root


async def test_pivot_by_entropy_branches_at_the_highest_entropy(thread):
    class Reading(BranchingEngine):
        async def score(self, requests):
            entropies = np.array([0.1, 0.2, 0.3, 0.0, 0.2, 0.1, 2.5, 0.9, 0.2, 0.0], np.float32)
            return [
                TokenLogprobs(
                    logprobs=entropies,
                    top_ids=np.empty((10, 0)),
                    top_logprobs=np.empty((10, 0)),
                    version=0,
                    entropies=entropies if request.wants_entropies else None,
                )
                for request in requests
            ]

    recipe = Pivot(pivots=2, branches=1, by="entropy")
    group = await grown(answer, recipe, Reading(), thread=thread, group_size=3)
    assert sorted(e.branching.place for e in group.episodes[1:]) == [6, 7]
    trained_once(group)


async def test_pivot_by_value_branches_at_the_first_token_of_the_worst_steps(thread):
    async def rewards_of(index: int) -> list[np.ndarray]:
        assert index == 0  # the root's
        rewards = np.zeros(num_prompt + 10, np.float32)
        rewards[num_prompt + np.array([2, 5, 9])] = [0.5, -0.25, 0.25]
        return [rewards]

    num_prompt = len(Renderer(TOKENIZER).render(TASK.prompt))
    recipe = Pivot(pivots=2, branches=1, by="value")
    engine = BranchingEngine()
    group = await grown(
        answer, recipe, engine, thread=thread, group_size=3, token_rewards=rewards_of
    )
    assert [e.branching.place for e in group.episodes[1:]] == [3, 6]
    with pytest.raises(
        TaskError, match="no scorer rewards single tokens while a group is generated"
    ):
        await grown(answer, recipe, engine, thread=thread, group_size=3)


async def test_turns_of_other_models_before_a_pivot_are_shared_and_never_branched(thread):
    async def hinted(task, agent):
        hint = await agent.role("guide", model="llama").chat([user(task.prompt)])
        await agent.chat([user(hint.text)])

    hints = itertools.count()
    guide = ChatEngine(lambda _: f"hint {next(hints)}", family="llama3")
    renderer = Renderer(TOKENIZERS["llama3"])
    model = role_model(renderer, path="llama", tool_format="llama3", max_context=2000)
    engine = BranchingEngine()
    others = {"llama": (model, guide)}
    recipe = Pivot(branches=3)
    group = await grown(hinted, recipe, engine, thread=thread, group_size=4, others=others)
    assert len(guide.requests) == 1  # of the root
    assert len(engine.requests) == 4
    assert len({request.prompt.tobytes() for request in engine.requests}) == 1
    for episode in group.episodes:
        (rollout,) = episode.rollouts
        assert rollout.agent == ""
        assert rollout.num_sampled == (10 if episode.branching.parent is None else 7)


async def test_multi_turn_environment_is_replayed_up_to_the_pivot(thread):
    class Late(BranchingEngine):
        async def generate(self, request, on_tokens=None, on_completion=None):
            (completion,) = await super().generate(request)
            if "and" in TOKENIZER.decode(request.prompt):
                completion.logprobs[6] = -9.0  # the second turn has the pivot
            return [completion]

    engine = Late()
    group = await grown(two_turns, Pivot(pivots=2, branches=2), engine, thread=thread, group_size=5)
    places = [e.branching.place for e in group.episodes if e.branching.parent is not None]
    assert sorted(places) == [3, 3, 16, 16]
    trained_once(group)
    root = group.episodes[0]
    for episode in group.episodes[1:]:
        assert episode.reward == root.reward  # the same draws
        assert episode.turns[0].prompt == root.turns[0].prompt
    num_second = sum("and" in TOKENIZER.decode(r.prompt) for r in engine.requests)
    assert num_second == 5
    assert len(engine.requests) == 5 + 3  # of the first turn: the root's, and two branches'


async def test_tree_has_branches_to_the_power_of_depth_leaves(thread):
    group = await grown(
        two_turns, Tree(branches=3, depth=2), BranchingEngine(), thread=thread, group_size=10
    )
    parents = [episode.branching.parent for episode in group.episodes]
    assert parents.count(None) == 2
    assert len(group.episodes) == 10
    trained_once(group)
    numbers = sorted(e.branching.number for e in group.episodes)
    assert numbers == list(range(10))


async def test_diverging_environment_gets_new_roots_instead_of_branches(thread):
    calls = itertools.count()

    async def moody(task, agent):
        await agent.chat([user(f"call {next(calls)}")])
        return 1.0

    group = await grown(moody, Pivot(branches=3), BranchingEngine(), thread=thread, group_size=4)
    assert [e.branching.parent for e in group.episodes] == [None] * 4
    assert sum(e.counts.get("branches_diverged", 0) for e in group.episodes) == 3


async def test_failing_episode_fails_its_group(thread):
    async def fragile(task, agent):
        reply = await agent.complete("x")
        raise ZeroDivisionError(reply.text)

    with pytest.raises(TaskError, match="'fragile' raised ZeroDivisionError"):
        await grown(fragile, Tree(), BranchingEngine(), thread=thread, group_size=4)


def test_invalid_recipe_settings_raise_config_error():
    with pytest.raises(ConfigError, match="trees of 7 episodes, but a group has 4"):
        Pivot(pivots=2, branches=3).check(4)
    with pytest.raises(ConfigError, match="trees of 8 episodes, but a group has 4"):
        Tree(depth=3).check(4)
    with pytest.raises(ConfigError, match=r"by = 'entropie' must be 'entropy', 'surprisal', "):
        build_recipe({"type": "pivot", "by": "entropie"})
    with pytest.raises(ConfigError, match=r"Unknown setting 'environment.recipe.branchs'"):
        build_recipe({"type": "tree", "branchs": 3})
    by_value = {"model": "m", "environment": {"recipe": {"type": "pivot", "by": "value"}}}
    with pytest.raises(ConfigError, match="needs a scorer that rewards single tokens, and there"):
        resolve_recipe(load_config(by_value), [function_scorer(len)])


async def test_branches_share_prefill_and_match_the_trainer(thread):
    engine = make_engine(kv="keep")
    remote = InProcessEngine(engine, receiver=None)
    running = asyncio.create_task(remote.run())
    try:
        player = player_of(two_turns, remote, thread=thread)
        player = with_recipe(player, Tree(branches=2, depth=2))
        player.sampling = Sampling(max_new_tokens=24)
        group = await player.play_for_training(TASK, attempt=Attempt(3), group_size=4)
    finally:
        running.cancel()
    trained_once(group)
    new = 0  # prompt tokens that are not shared
    for episode in group.episodes:
        for rollout in episode.rollouts:
            start = 0 if episode.branching.parent is None else rollout.mask.argmax()
            new += int((rollout.places[start:] < 0).sum())
    num_turns = 2 * len(group.episodes)
    assert engine.stats().prefill_tokens <= new + num_turns * (1 + BLOCK)
    judged = combine(group, [], scorers=[])
    scored = with_advantages(judged, TreeAdvantages()(judged))
    batch = pack([scored], microbatch_tokens=4096)
    assert batch.num_trained_tokens == sum(r.num_sampled for r in group.rollouts)
    num_rows = sum(len(micro.tokens) for micro in batch.microbatches)
    assert num_rows < sum(len(rollout.tokens) for rollout in group.rollouts)
    assert_says_the_same(make_trainer(), batch)
