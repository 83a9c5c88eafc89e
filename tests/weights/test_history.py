import pytest
import torch

from millrace.scoring.teachers.worker import AveragedWeights, LaggedWeights


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value, 2 * value])}


def served(history: AveragedWeights | LaggedWeights, version: int) -> tuple[int, float] | None:
    """What is due once this version, whose weights are its number, is there."""
    due = history.take(version, weights(float(version)))
    return None if due is None else (due.version, due.tensors["w"][0].item())


def test_an_average_keeps_its_decay_of_itself():
    average = AveragedWeights(weights(0.0), decay=0.75, every=1, version=0)
    assert served(average, 1) == (1, 0.25)
    assert served(average, 2) == (2, 0.75 * 0.25 + 0.25 * 2)


def test_a_version_that_comes_alone_stands_for_those_left_out():
    average = AveragedWeights(weights(1.0), decay=0.5, every=1, version=0)
    assert served(average, 3) == (3, 1 / 8 * 1 + 7 / 8 * 3)


def test_an_average_is_kept_in_float32_whatever_arrives():
    start = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    average = AveragedWeights(start, decay=0.999, every=1, version=0)
    due = average.take(1, {"w": torch.ones(1, dtype=torch.bfloat16)})
    assert due is not None
    assert due.tensors["w"].dtype == torch.float32
    assert due.tensors["w"].item() == pytest.approx(0.001)
    assert start["w"].item() == 0  # and of its own


def test_an_average_without_a_start_begins_with_the_first_version():
    average = AveragedWeights(None, decay=0.5, every=1, version=4)
    assert served(average, 6) == (6, 6.0)
    assert served(average, 7) == (7, 6.5)


def test_a_refresh_is_due_every_so_many_versions_also_if_that_one_was_left_out():
    average = AveragedWeights(weights(0.0), decay=0.5, every=4, version=0)
    due = [served(average, version) for version in (1, 2, 3, 5, 6, 7, 8)]
    assert [d and d[0] for d in due] == [None, None, None, 5, None, None, 8]


def test_a_lag_serves_the_policy_of_so_many_versions_ago():
    lagged = LaggedWeights(lag=2, every=1, version=0)
    due = [served(lagged, version) for version in range(1, 6)]
    assert due == [None, None, (1, 1.0), (2, 2.0), (3, 3.0)]


def test_no_lag_is_the_newest_version():
    lagged = LaggedWeights(lag=0, every=2, version=0)
    assert [served(lagged, version) for version in (1, 2, 3, 4)] == [None, (2, 2.0), None, (4, 4.0)]


def test_of_what_was_left_out_the_next_older_serves():
    lagged = LaggedWeights(lag=3, every=1, version=0)
    assert [served(lagged, version) for version in (1, 2, 6)] == [None, None, (2, 2.0)]
    assert served(lagged, 7) is None  # 4 never came, and 2 is served already


def test_a_lag_keeps_one_version_more_than_its_length():
    lagged = LaggedWeights(lag=3, every=5, version=0)
    for version in range(1, 30):
        served(lagged, version)
        assert len(lagged.kept) <= 4


def test_what_is_kept_does_not_change_with_what_was_lent():
    lagged = LaggedWeights(lag=1, every=1, version=0)
    lent = weights(1.0)
    lagged.take(1, lent)
    lent["w"].fill_(9.0)
    due = lagged.take(2, lent)
    assert due is not None
    assert due.tensors["w"].tolist() == [1.0, 2.0]
