"""Agents on a real engine: the trainer's logprobs, the cost of turns, forks."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from astray import lead_astray
from chat_engine import user
from hypothesis import given, settings
from hypothesis import strategies as st
from talking_model import (
    BLOCK,
    TOKENIZER,
    agent_on,
    assert_says_the_same,
    make_engine,
    make_trainer,
    weights,
)

from millrace.core.errors import TaskError
from millrace.core.records import Episode, Group, Rollout, Score, Task
from millrace.environments.token_record import Exchange
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.training.packing.packer import pack
from millrace.training.trainer import Trainer


def search(key: str, limit: int = 1) -> str:
    """Looks up."""
    return key * limit


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The turns of a conversation."""

    prompt: str
    num_tools: int
    truncates: bool
    turns: tuple[tuple[str, bool, int], ...]  # action, whether at a lower temperature, number


SCRIPTS = st.builds(
    Script,
    prompt=st.text(alphabet="xyz ", min_size=1, max_size=8),
    num_tools=st.integers(0, 2),
    truncates=st.booleans(),
    turns=st.lists(
        st.tuples(
            st.sampled_from(["drop", "summarise", "fork", "tool", "ask"]),
            st.booleans(),
            st.integers(0, 11),
        ),
        min_size=1,
        max_size=5,
    ).map(tuple),
)


async def converse(agent, script: Script) -> None:
    """Draw some turns, with or without tools and with occasional edits of the history."""
    messages = [user(script.prompt)]
    tools = [search, add][: script.num_tools]
    for action, cooler, number in script.turns:
        reply = await agent.chat(messages, tools=tools, temperature=0.7 if cooler else 1.0)
        num_sampled = len(reply.exchange.completion.tokens)
        if action == "drop" and len(messages) > 2:
            messages = messages[:-2]
        elif action == "summarise":
            messages = [user(f"So far {len(messages)} messages.")]
        elif action == "fork":
            await agent.fork(reply, at=number % num_sampled)
        else:
            answer = {"role": "tool", "content": "12" * (1 + number % 4)}
            messages = [*messages, reply, answer if action == "tool" else user("and?")]


def group_of(rollouts: tuple[Rollout, ...]) -> Group:
    """Use the number of each token as its advantage, to identify it later."""
    numbers = np.cumsum([0, *(len(r.tokens) for r in rollouts)])
    return Group(
        number=0,
        task=Task(prompt=""),
        episodes=(Episode(turns=(), rollouts=rollouts),),
        scores=(Score(total=0.0, parts={}),),
        advantages=np.zeros(1, np.float32),
        token_advantages=tuple(
            np.arange(begin, begin + len(r.tokens), dtype=np.float32)
            for begin, r in zip(numbers, rollouts, strict=False)
        ),
    )


def says_the_same(script: Script, *, engine: EmbeddedEngine, trainer: Trainer) -> None:
    async def rollouts_of() -> tuple[tuple[Rollout, ...], list[Exchange]]:
        truncation = {"top_k": 20, "top_p": 0.9} if script.truncates else {}
        async with agent_on(engine, seed=len(script.prompt), **truncation) as (agent, state):
            await converse(agent, script)
            return state.rollouts(), agent.record.exchanges

    rollouts, exchanges = asyncio.run(rollouts_of())
    num_sampled = sum(len(exchange.completion.tokens) for exchange in exchanges)
    assert sum(r.num_sampled for r in rollouts) == num_sampled
    batch = pack([group_of(rollouts)], microbatch_tokens=4096)
    assert batch.num_trained_tokens == num_sampled
    assert_says_the_same(trainer, batch)


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("num_experts", "num_conversations"),
    [(0, 12), (8, 6), pytest.param(0, 80, marks=SLOW), pytest.param(8, 80, marks=SLOW)],
)
def test_trainer_logprobs_match_the_engine_for_any_conversation(
    num_experts: int, num_conversations: int
):
    engine = make_engine(num_experts=num_experts)
    lead_astray(engine, num_experts=num_experts)
    trainer = make_trainer(num_experts=num_experts)

    @settings(max_examples=num_conversations, deadline=None, derandomize=True)
    @given(script=SCRIPTS)
    def check(script: Script) -> None:
        says_the_same(script, engine=engine, trainer=trainer)

    check()


@pytest.mark.parametrize("swaps", [False, True])
async def test_turn_prefills_only_new_tokens_even_across_weight_swaps(swaps: bool):
    engine = make_engine(kv="keep")
    costs, new = [], []
    async with agent_on(engine, max_new_tokens=8) as (agent, _):
        messages = [user("hello there")]
        for turn in range(12):
            before = engine.stats().prefill_tokens
            reply = await agent.chat(messages)
            costs.append(engine.stats().prefill_tokens - before)
            new.append(len(reply.exchange.given))
            messages = [*messages, reply, user("go on, please")]
            if swaps and turn % 3 == 1:
                engine.swap(weights(turn), version=turn)
        num_tokens = reply.exchange.end
    # New tokens, the last sampled token, and tokens that fill no whole block.
    for cost, num_new in zip(costs[1:], new[1:], strict=True):
        assert cost <= num_new + 1 + BLOCK
    assert sum(costs) <= num_tokens + 12 * (1 + BLOCK)


async def test_swap_without_kept_kv_recomputes_the_prefix_once():
    engine = make_engine(kv="recompute")
    async with agent_on(engine, max_new_tokens=8) as (agent, _):
        first = await agent.chat([user("hello there " * 5)])
        engine.swap(weights(1), version=1)
        before = engine.stats().prefill_tokens
        second = await agent.chat([*first.prompt, first, user("go on")])
        num_prompt = second.exchange.end - len(second.exchange.completion.tokens)
        assert engine.stats().prefill_tokens - before == num_prompt


@pytest.mark.parametrize("swaps", [False, True])
async def test_fork_reuses_the_prefill_of_shared_tokens(swaps: bool):
    engine = make_engine(kv="keep")
    async with agent_on(engine, max_new_tokens=40) as (agent, state):
        reply = await agent.chat([user("hello there " * 20)])
        num_sampled = len(reply.exchange.completion.tokens)
        assert num_sampled > 10
        if swaps:
            engine.swap(weights(1), version=1)
        for at in (0, num_sampled // 2, num_sampled - 1):
            before = engine.stats().prefill_tokens
            fork = await agent.fork(reply, at=at)
            assert engine.stats().prefill_tokens - before <= BLOCK
            assert fork.num_recomputed < BLOCK  # tokens that fill no whole block
            assert not fork.recomputed
            assert set(fork.exchange.completion.versions) == {1 if swaps else 0}
            begun = reply.exchange.tokens()[: -num_sampled + at or None]
            np.testing.assert_array_equal(fork.exchange.tokens()[: len(begun)], begun)
        trained = [r.num_sampled for r in state.rollouts()]
        assert sum(trained) == sum(len(e.completion.tokens) for e in agent.record.exchanges)


async def test_unpinned_fork_is_computed_with_current_weights():
    engine = make_engine(kv="keep")
    async with agent_on(engine, max_new_tokens=20) as (agent, _):
        reply = await agent.chat([user("hello there " * 5)])
        engine.swap(weights(1), version=1)
        before = engine.stats().prefill_tokens
        fork = await agent.fork(reply, at=5, pinned=False)
        assert engine.stats().prefill_tokens - before == fork.exchange.start
        assert set(fork.exchange.completion.versions) == {1}


@pytest.mark.parametrize("held", ["kept", "given up"])
async def test_pinned_fork_reports_recomputed_kv(held: str):
    engine = make_engine(kv="keep" if held == "kept" else "recompute")
    async with agent_on(engine, max_new_tokens=20) as (agent, _):
        reply = await agent.chat([user("hello there " * 5)])
        same = await agent.fork(reply)
        engine.swap(weights(1), version=1)
        fork = await agent.fork(reply, at=5)
        assert (same.recomputed, fork.recomputed) == (False, held == "given up")
        shared = fork.exchange.start
        whole = shared - shared % BLOCK if held == "kept" else 0
        assert fork.num_recomputed == shared - whole
        assert fork.exchange.completion.kv.spans[0] == (0, 0 if held == "kept" else 1)
        again = await agent.fork(fork, at=3)  # compared with the fork that it forks
        assert not again.recomputed
        expected = {"forks": 3} | ({"forks_recomputed": 1} if held == "given up" else {})
        assert {k: v for k, v in agent._state.counts.items() if v} == expected


async def test_conversation_continues_after_a_fork():
    engine = make_engine()
    async with agent_on(engine, max_new_tokens=20) as (agent, _state):
        reply = await agent.chat([user("hello")])
        fork = await agent.fork(reply, at=3)
        last = await agent.chat([*reply.prompt, fork, user("more")])
        assert last.exchange.parent is fork.exchange
        assert fork.exchange.parent is reply.exchange
        own = fork.exchange.completion.tokens[:-1]
        again = await agent.fork(fork, at=len(own))
        shared = [*reply.exchange.completion.tokens[:3], *own]
        assert again.text == TOKENIZER.decode(shared) + again.exchange.completion.text
        with pytest.raises(TaskError, match="at = 99, but the reply has"):
            await agent.fork(reply, at=99)
        text = await agent.complete("abc")
        other = await agent.fork(text, at=len(text.exchange.completion.tokens) - 1)
        after = await agent.complete(f"abc{other.text} and")
        assert after.exchange.parent is other.exchange
