import pytest

from millrace.monitoring.terminal.text import counts, curve, duration, rate


@pytest.mark.parametrize(
    ("seconds", "text"), [(7, "0:07"), (750, "12:30"), (11100, "3:05:00"), (59.6, "1:00")]
)
def test_duration_has_hours_only_if_needed(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (8.126, "8.13"),
        (51.24, "51.2"),
        (812, "812"),
        (10_234, "10.2k"),
        (2e6, "2.00M"),
    ],
)
def test_rates_have_three_digits(value, text):
    assert rate(value) == text


def test_counts_name_their_reasons_most_frequent_first():
    assert counts({"timed out": 1, "too stale": 3}) == "4 (too stale 3, timed out 1)"
    assert counts({"too stale": 0}) == counts({}) == "0"


def test_a_curve_fills_its_box_from_lowest_to_highest():
    assert curve([0.0, 1.0, 2.0, 3.0], columns=10, rows=2) == (["  ▃█", "▁▆██"], 0.0, 3.0)


def test_a_long_curve_is_averaged_into_its_columns():
    assert curve([0.0] * 50 + [1.0] * 50, columns=4, rows=1) == (["▁▁██"], 0.0, 1.0)


def test_a_flat_curve_is_drawn():
    assert curve([0.5, 0.5], columns=4, rows=1) == (["▁▁"], 0.5, 0.5)
