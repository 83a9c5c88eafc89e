import dataclasses

import numpy as np
import pytest
from fakes import make_group, make_rollout
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.staleness import PolicyVersions, StalenessLimit, TokenVersions

limits = st.builds(
    StalenessLimit,
    max_staleness=st.integers(0, 4),
    measure=st.sampled_from(["oldest", "mean", "share"]),
    max_stale_share=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
)
versions = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def token_versions_of(tokens):
    return TokenVersions.of(np.array(tokens, np.int32))


def test_only_trained_tokens_count():
    group = make_group(0, versions=[3, 3, 4, 7], size=2)
    assert TokenVersions.of_group(group).counts == {3: 4, 4: 2, 7: 2}
    masked = dataclasses.replace(make_rollout(), mask=np.zeros(7, bool))
    assert TokenVersions.of_rollout(masked).counts == {}
    assert TokenVersions.of_rollout(masked).oldest is None


def test_share_is_compared_without_rounding():
    limit = StalenessLimit(max_staleness=0, measure="share", max_stale_share=0.29)
    assert limit.allows(TokenVersions(counts={0: 29, 1: 71}), version=1)  # 0.29 * 100 < 29
    assert not limit.allows(TokenVersions(counts={0: 30, 1: 70}), version=1)


@given(tokens=versions)
def test_stamps_agree_with_their_tokens(tokens):
    token_versions = token_versions_of(tokens)
    assert (token_versions.oldest, token_versions.spread) == (
        min(tokens),
        max(tokens) - min(tokens),
    )
    assert token_versions.num_tokens == len(tokens)
    assert token_versions.num_before(5) == sum(version < 5 for version in tokens)
    assert token_versions.total_staleness(9) == sum(9 - version for version in tokens)
    joined = TokenVersions.joined([token_versions_of(tokens[:3]), token_versions_of(tokens[3:])])
    assert list(joined.counts.items()) == list(token_versions.counts.items())


@given(limit=limits, tokens=versions)
def test_measures_by_definition(limit, tokens):
    staleness = 9 - np.array(tokens)
    expected = {
        "oldest": staleness.max() <= limit.max_staleness,
        "mean": staleness.sum() <= limit.max_staleness * len(tokens),
        "share": (staleness > limit.max_staleness).mean() <= limit.max_stale_share,
    }[limit.measure]
    assert limit.allows(token_versions_of(tokens), version=9) == expected


@given(limit=limits, tokens=versions, later=st.integers(10, 14))
def test_group_that_is_too_stale_stays_too_stale(limit, tokens, later):
    token_versions = token_versions_of(tokens)
    assert limit.allows(token_versions, version=9) or not limit.allows(
        token_versions, version=later
    )


@given(limit=limits, tokens=versions, more=versions)
def test_one_stale_token_decides_if_the_limit_says_so(limit, tokens, more):
    together = token_versions_of([*tokens, *more])
    if limit.one_token_decides and not limit.allows(token_versions_of(tokens), version=9):
        assert not limit.allows(together, version=9)


@pytest.mark.parametrize(
    "limit",
    [
        StalenessLimit(max_staleness=1, measure="mean"),
        StalenessLimit(max_staleness=0, measure="share", max_stale_share=0.01),
    ],
)
def test_enough_fresh_tokens_outweigh_a_stale_one_otherwise(limit):
    assert not limit.one_token_decides
    assert not limit.allows(TokenVersions(counts={0: 10}), version=9)
    assert limit.allows(TokenVersions(counts={0: 10, 9: 10_000}), version=9)


def test_tokens_are_as_stale_as_their_own_policy_has_versions_since():
    versions = PolicyVersions({"a": 5, "b": 2}, step=5)
    versions.record(6, trained=["a"])
    versions.record(7, trained=["a", "b"])
    versions.record(8, trained=[])
    assert [versions.at(step, policy="a") for step in (5, 6, 7, 8)] == [5, 6, 7, 7]
    assert [versions.at(step, policy="b") for step in (5, 6, 7, 8)] == [2, 2, 3, 3]
    assert versions.at(7) == 7  # the first
    # Engines that hold a version are up to date until the step that makes the next.
    assert [versions.through(version, policy="b") for version in (2, 3)] == [6, 8]
    assert [versions.through(version) for version in (5, 6, 7)] == [5, 6, 8]
    group = TokenVersions.joined(
        [
            TokenVersions.of(np.array([5, 6, 6]), policy="a"),
            TokenVersions.of(np.array([2]), policy="b"),
            TokenVersions.of(np.array([5])),  # of the first
        ]
    )
    # After step 7, a has version 7 and b version 3.
    assert versions.aligned(group, 7).counts == {7 - 2: 2, 7 - 1: 3}
    assert versions.aligned(group, 6).counts == {6 - 1: 2, 6 - 0: 3}
    limit = StalenessLimit(max_staleness=1)
    assert limit.allows(versions.aligned(group, 6), version=6)
    assert not limit.allows(versions.aligned(group, 7), version=7)


def test_version_of_one_policy_is_the_step():
    versions = PolicyVersions()
    versions.record(4, trained=())
    token_versions = token_versions_of([1, 2])
    assert versions.aligned(token_versions, 4) is token_versions
    assert versions.at(4) == versions.through(4) == 4
