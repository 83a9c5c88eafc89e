import pytest

from millrace.core.errors import ConfigError
from millrace.core.records import ScorerResult
from millrace.scoring.scheduling.scorer_queue import ScoreGate, check_gates, parse_gate


def gate(text):
    return parse_gate(text, section="scorer.0")


@pytest.mark.parametrize(
    ("text", "passing", "failing"),
    [
        ("format >= 1", 1.0, 0.9),
        ("format>0.5", 0.6, 0.5),
        ("format <= -1", -1.0, 0.0),
        ("format < 2", 1.0, 2.0),
        ("format == 1e0", 1.0, 2.0),
        (" format  !=  0 ", 1.0, 0.0),
    ],
)
def test_a_gate_compares_the_other_scorers_score(text, passing, failing):
    found = gate(text)
    assert found.scorer == "format"
    assert found.passes(ScorerResult(score=passing))
    assert not found.passes(ScorerResult(score=failing))
    assert not found.passes(ScorerResult())


def test_scorer_name_in_a_gate_may_contain_blanks():
    assert gate("my format >= 1") == ScoreGate(scorer="my format", comparison=">=", limit=1.0)


@pytest.mark.parametrize("text", ["format", "format >= one", ">= 1", "format => 1", ""])
def test_invalid_condition_is_refused(text):
    with pytest.raises(ConfigError, match=r"'scorer.0.when' = .* is not a condition; write"):
        gate(text)


def test_unknown_names_and_cycles_are_refused():
    with pytest.raises(
        ConfigError, match="'b' waits for 'c', which is not a scorer; the scorers are: a, b"
    ):
        check_gates({"a": None, "b": gate("c > 0")})
    with pytest.raises(ConfigError, match="wait for each other: a -> b -> a; remove"):
        check_gates({"c": gate("a > 0"), "a": gate("b > 0"), "b": gate("a > 0")})
    with pytest.raises(ConfigError, match="wait for each other: a -> a"):
        check_gates({"a": gate("a > 0")})
    check_gates({"a": None, "b": gate("a > 0"), "c": gate("b > 0")})
