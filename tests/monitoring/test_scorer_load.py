"""Reports about scorers that limit a run."""

from dataclasses import replace

from synthetic_run import make_run, metrics_row

from millrace.core.spans import ScorerLoad
from millrace.monitoring.activity import ScorerRates, limit_text, total_text
from millrace.monitoring.files.metrics import MetricsLog
from millrace.monitoring.report.summary import summary_rows

LOAD = ScorerLoad(
    concurrency=4,
    in_flight=4,
    waiting=120,
    busy_s=100.0,
    waiting_s=900.0,
    episodes=50,
    calls=53,
    retries=3,
    failures=0,
    skipped=7,
    breaker_opened=0,
    is_held=False,
)


def test_row_has_busy_share_and_wait_since_the_last_row():
    now = [0.0]
    rates = ScorerRates(now=lambda: now[0])
    rates.row({"judge": LOAD})
    now[0] = 10.0
    later = replace(LOAD, busy_s=130.0, waiting_s=1000.0, episodes=70)
    row = rates.row({"judge": later, "new": replace(LOAD, busy_s=20.0)})
    assert row["judge"]["busy"] == 0.75
    assert row["judge"]["wait_s"] == 5.0
    assert (row["judge"]["waiting"], row["judge"]["in_flight"]) == (120, 4)
    assert (row["judge"]["calls"], row["judge"]["retries"], row["judge"]["skipped"]) == (53, 3, 7)
    assert row["new"]["busy"] == 0.5


def test_warning_says_how_much_scoring_limits_the_run():
    idle = replace(LOAD, in_flight=0, waiting=0)
    assert limit_text({"judge": LOAD, "idle": idle}, waited=0.634) == (
        "scoring limits the run: the trainer spends 63% of its time waiting for scores;"
        " judge 4/4 busy, 120 episodes waiting"
    )
    held = replace(LOAD, in_flight=0, is_held=True)
    assert limit_text({"judge": held}, waited=1.0).endswith(
        "judge 0/4 busy, 120 episodes waiting until the scorer is reachable again"
    )
    assert limit_text({"judge": LOAD}, waited=0.05) == ""


def test_summary_has_totals_of_scorers_and_their_cost(tmp_path):
    rates = ScorerRates()
    totals = rates.row({"judge": LOAD})["judge"]
    assert (
        total_text(totals) == "50 episodes in 53 calls, 3 retries, 7 episodes skipped by its gate"
    )
    log = MetricsLog(make_run(tmp_path / "x", steps=4).metrics, resume_from=4)
    log.write({**metrics_row(5), "scorer": {"judge": totals}})
    log.close()
    summary = dict(summary_rows(tmp_path / "x"))
    assert summary["scoring"] == "limited the run: the trainer waited for scores 20% of its time"
    assert summary["scorer judge"] == total_text(totals)
