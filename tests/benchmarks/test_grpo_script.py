"""benchmarks/grpo_on_gpu.py as a user runs it, on a tiny model, and its parts."""

import json
from pathlib import Path

import grpo_on_gpu
import pytest
from grpo_run import Measurement, compare, load_measurement
from sums import exact_sum, make_tasks
from tiny_model import make_tiny_model
from transformers import AutoTokenizer

STEPS, PROMPTS, GROUP = 2, 2, 2


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    directory = make_tiny_model(tmp_path_factory.mktemp("model"), max_context=256)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def finished(chat_model, tmp_path_factory) -> Path:
    """The folder of one finished run of the script. It runs in this process, because another one
    would have to import PyTorch again."""
    folder = tmp_path_factory.mktemp("grpo")
    sizes = ["--steps", STEPS, "--prompts", PROMPTS, "--group", GROUP, "--max-new-tokens", 8]
    files = ["--json", folder / "rows.json", "--save", folder / "run.json", "--keep", folder]
    arguments = [chat_model, "--device", "cpu", *sizes, *files]
    grpo_on_gpu.main([str(argument) for argument in arguments])
    return folder


@pytest.mark.slow
def test_script_writes_a_row_per_measure(finished):
    rows = {row["measure"]: row for row in json.loads((finished / "rows.json").read_text())}
    assert all({"ours", "peer", "ratio"} <= row.keys() for row in rows.values())
    rate = rows["samples_per_s"]
    assert rate["ours"] > 0
    assert rate["peer"] is None, "the recorded rate is for a GPU and for other sizes"
    assert 0 <= rate["trainer_busy"] <= 1
    assert "trainer" in rate["idle_reasons"]
    assert len(rows["logprob_mismatch"]["per_step"]) == STEPS
    assert 0 < rows["completion_tokens_mean"]["ours"] <= 8
    assert rows[f"reward of the first {STEPS * PROMPTS * GROUP} samples"]["curve"][-1][0] == 8


@pytest.mark.slow
def test_saved_run_can_be_the_peer_of_another(finished):
    run = load_measurement(finished / "run.json")
    ratios = {row["measure"]: row["ratio"] for row in compare(run, run)}
    assert ratios["samples_per_s"] == ratios["logprob_mismatch"] == 1


def make_measurement(
    *, samples_per_step: int, times_s: list[float], rewards: list[float]
) -> Measurement:
    return Measurement(
        name="by hand",
        samples_per_step=samples_per_step,
        times_s=times_s,
        rewards=rewards,
        mean_lengths=[4.0] * len(rewards),
        mismatches=[],
        ended_share=None,
        peak_gpu_bytes=None,
        notes={},
    )


def test_samples_per_second_excludes_first_half_of_short_run():
    run = make_measurement(samples_per_step=8, times_s=[100, 101, 103, 105], rewards=[0] * 4)
    assert run.samples_per_s == 2 * 8 / (105 - 101)


def test_samples_per_second_excludes_ten_steps_of_long_run():
    times_s = [10.0 * step for step in range(10)] + [100.0 + step for step in range(10)]
    run = make_measurement(samples_per_step=8, times_s=times_s, rewards=[0] * 20)
    assert run.samples_per_s == 10 * 8 / (109 - 90)


def test_rewards_are_compared_over_the_same_number_of_samples():
    ours = make_measurement(samples_per_step=8, times_s=[1, 2, 3, 4], rewards=[0.0, 0.2, 0.9, 0.9])
    peer = make_measurement(samples_per_step=4, times_s=[1, 2, 3, 4], rewards=[0.0, 0.0, 0.1, 0.1])
    rows = {row["measure"]: row for row in compare(ours, peer)}
    row = rows["reward of the first 16 samples"]
    assert (row["ours"], row["peer"]) == pytest.approx((0.1, 0.05))
    assert row["ratio"] == pytest.approx(2)


def test_recorded_rate_replaces_a_missing_peer():
    ours = make_measurement(samples_per_step=8, times_s=[1, 2, 3, 4], rewards=[0.0] * 4)
    rate = compare(ours, None, recorded=2.0)[0]
    assert (rate["ours"], rate["peer"], rate["ratio"]) == (8, 2, 4)


def test_reward_counts_the_last_number_of_an_answer():
    texts = ["82", "37 + 45 = 82.", "82 is 37 + 45", "", "eighty-two", "-82", "8.2", "The sum: 82!"]
    rewards = exact_sum(completions=texts, answer=["82"] * len(texts))
    assert rewards == [1, 1, 0, 0, 0, 0, 0, 1]


def test_reward_reads_chat_answers():
    answers = [[{"role": "assistant", "content": "It is 1,082."}]]
    assert exact_sum(completions=answers, answer=["1082"]) == [1]


def test_tasks_are_sums_of_numbers_below_100_and_repeat_with_their_seed():
    tasks = make_tasks(500, seed=3)
    assert tasks == make_tasks(500, seed=3) != make_tasks(500, seed=4)
    for task in tasks:
        (message,) = task["prompt"]
        a, b = (int(word) for word in message["content"].split("?")[0].split()[2::2])
        assert 0 <= a < 100
        assert 0 <= b < 100
        assert task["answer"] == str(a + b)
