from metrics_page import described_metrics, unknown_metrics


def test_page_describes_each_metric_once_in_a_sentence():
    names = [name for name, _ in described_metrics()]
    assert len(names) > 90
    assert len(set(names)) == len(names)
    for _, text in described_metrics():
        assert text[0].isupper() or text[0].isdigit(), text
        assert text.endswith("."), text


def test_capitals_stand_for_names_of_the_run():
    known = ["rewards/a/b/mean", "eval/pass@8", "waiting/engine-0/buffer_full", "staleness/share/3"]
    assert unknown_metrics(known) == []
    assert unknown_metrics(["reward_mean", "scorer/judge/speed"]) == [
        "reward_mean",
        "scorer/judge/speed",
    ]
