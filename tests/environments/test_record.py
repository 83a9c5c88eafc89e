from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.records import Completion, Episode, Group, Kept, Sampling, Score, Task
from millrace.environments.token_record import Exchange, TokenRecord
from millrace.training.packing.packer import pack

PLAIN = Sampling()


def sampled(*tokens: int, version: int = 0, kept: bool = False) -> Completion:
    offsets = np.arange(0, 2 * len(tokens) + 1, 2, dtype=np.int64)
    ids = np.array([row for token in tokens for row in (token, 1000 + token)], np.int32)
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        versions=np.full(len(tokens), version, np.int32),
        kept=Kept(ids=ids, offsets=offsets) if kept else None,
        finish="stop",
        text="",
    )


def add(record: TokenRecord, given: list[int], *tokens: int, **where) -> Exchange:
    return record.add(np.array(given), sampled(*tokens), sampling=PLAIN, **where)


def trained(record: TokenRecord) -> list[list[int]]:
    return [rollout.tokens[rollout.mask].tolist() for rollout in record.rollouts()]


def test_consecutive_turns_form_one_rollout():
    record = TokenRecord()
    first = record.add(np.array([1, 2]), sampled(3, 4, version=5), sampling=PLAIN)
    record.add(np.array([6]), sampled(7, version=6), sampling=PLAIN, parent=first)
    (rollout,) = record.rollouts()
    assert rollout.tokens.tolist() == [1, 2, 3, 4, 6, 7]
    assert rollout.mask.tolist() == [False, False, True, True, False, True]
    assert rollout.engine_logprobs.tolist() == [0, 0, -3, -4, 0, -7]
    assert rollout.versions.tolist() == [-1, -1, 5, 5, -1, 6]


def test_shared_tokens_are_trained_in_the_first_branch():
    record = TokenRecord()
    first = add(record, [1, 2], 3, 4)
    add(record, [5], 6, parent=first)
    add(record, [7], 8, 9, parent=first)
    assert trained(record) == [[3, 4, 6], [8, 9]]
    assert record.rollouts()[1].tokens.tolist() == [1, 2, 3, 4, 7, 8, 9]


def test_fork_within_a_reply_keeps_both_branches():
    record = TokenRecord()
    first = add(record, [1], 2, 3, 4, 5)
    add(record, [], 6, 7, parent=first, at=3)
    assert [r.tokens.tolist() for r in record.rollouts()] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert trained(record) == [[2, 3, 4, 5], [6, 7]]


def test_fork_before_the_last_turn_extends_the_turn_that_contains_it():
    record = TokenRecord()
    first = add(record, [1], 2, 3)
    second = add(record, [4], 5, 6, parent=first)
    fork = add(record, [], 7, parent=second, at=2)
    assert fork.parent is first
    assert fork.tokens().tolist() == [1, 2, 7]
    assert trained(record) == [[2, 3, 5, 6], [7]]


def test_each_temperature_has_its_own_rollout():
    record = TokenRecord()
    first = add(record, [1, 2], 3)
    hot = replace(PLAIN, temperature=2.0)
    record.add(np.array([4]), sampled(5, 6), sampling=hot, parent=first)
    assert trained(record) == [[3], [5, 6]]
    assert [r.sampling.temperature for r in record.rollouts()] == [1.0, 2.0]


def test_kept_ids_belong_to_trained_tokens():
    truncated = Sampling(top_k=2)
    record = TokenRecord()
    first = record.add(np.array([1]), sampled(2, 3, kept=True), sampling=truncated)
    for token in (5, 6):
        completion = sampled(token, kept=True)
        record.add(np.array([4]), completion, sampling=truncated, parent=first)
    one, other = record.rollouts()
    assert one.kept is not None
    assert one.kept.ids.tolist() == [2, 1002, 3, 1003, 5, 1005]
    assert one.kept.offsets.tolist() == [0, 0, 2, 4, 4, 6]
    assert other.kept is not None
    assert other.kept.ids.tolist() == [6, 1006]
    assert other.kept.offsets.tolist() == [0, 0, 0, 0, 0, 2]


def routed(*tokens: int, rows: list[int]) -> Completion:
    """Return a completion with routes of one layer and one expert per token."""
    return replace(sampled(*tokens), routes=np.array(rows, np.uint8).reshape(-1, 1, 1))


def test_routes_come_from_the_exchange_that_continued_after_the_token():
    record = TokenRecord()
    first = record.add(np.array([1, 2]), routed(3, 4, 5, rows=[10, 11, 12, 13]), sampling=PLAIN)
    # Routes start at the last recorded token, which no forward pass had read before.
    record.add(np.array([6]), routed(7, rows=[24, 25]), sampling=PLAIN, parent=first)
    record.add(np.array([]), routed(8, 9, rows=[32, 33]), sampling=PLAIN, parent=first, at=3)
    turns, fork = (r.routes for r in record.rollouts())
    assert turns is not None
    assert turns[:, 0, 0].tolist() == [10, 11, 12, 13, 24, 25, 255]
    assert fork is not None
    assert fork[:, 0, 0].tolist() == [10, 11, 32, 33, 255]


def test_missing_route_rows_are_unknown():
    record = TokenRecord()
    first = record.add(np.array([1, 2]), routed(3, 4, rows=[10]), sampling=PLAIN)
    second = record.add(np.array([5]), sampled(6, 7), sampling=PLAIN, parent=first)
    record.add(np.array([8]), routed(9, rows=[26, 27]), sampling=PLAIN, parent=second)
    (rollout,) = record.rollouts()
    assert rollout.routes is not None
    assert rollout.routes[:, 0, 0].tolist() == [10, *[255] * 5, 26, 27, 255]


@st.composite
def trees(draw: st.DrawFn) -> TokenRecord:
    """Make trees in which every sampled token is unique."""
    record, numbers = TokenRecord(), iter(range(10_000, 20_000))
    for _ in range(draw(st.integers(1, 8))):
        parents = [None, *record.exchanges]
        parent = parents[draw(st.integers(0, len(parents) - 1))]
        at = draw(st.integers(1, parent.end)) if parent and draw(st.booleans()) else None
        num_given = draw(st.integers(0 if parent else 1, 3))
        tokens = [next(numbers) for _ in range(draw(st.integers(1, 5)))]
        record.add(
            np.arange(num_given),
            sampled(*tokens),
            sampling=replace(PLAIN, temperature=draw(st.sampled_from([1.0, 0.5]))),
            parent=parent,
            at=at,
        )
    return record


@settings(max_examples=100, deadline=None)
@given(trees())
def test_every_sampled_token_is_trained_once_with_its_own_context(record):
    contexts = {
        int(token): exchange.tokens()[: exchange.start + len(exchange.given) + i].tolist()
        for exchange in record.exchanges
        for i, token in enumerate(exchange.completion.tokens)
    }
    found = {}
    for rollout in record.rollouts():
        for at in np.flatnonzero(rollout.mask):
            assert int(rollout.tokens[at]) not in found
            found[int(rollout.tokens[at])] = rollout.tokens[:at].tolist()
            assert rollout.engine_logprobs[at] == -rollout.tokens[at]
    assert found == contexts


def test_trainer_computes_the_shared_prefix_of_branches_once():
    record = TokenRecord()
    first = add(record, [1, 2, 3, 4], 5, 6)
    for token in (7, 8, 9):
        add(record, [0], token, token, parent=first)
    group = Group(
        number=0,
        task=Task(prompt=""),
        episodes=(Episode(turns=(), rollouts=record.rollouts()),),
        scores=(Score(total=1.0, parts={}),),
        advantages=np.ones(1, np.float32),
    )
    (micro,) = pack([group], microbatch_tokens=100).microbatches
    # The 6 tokens of the first turn and the next prompt token once; then one row per branch.
    assert len(micro.tokens) == 7 + 3
    assert sorted(micro.targets.tolist()) == [5, 6, 7, 7, 8, 8, 9, 9]
