"""benchmarks/process_rewards.py and pipelined_scoring.py in small sizes."""

import json
import random
import sys

import chains
import pipelined_scoring
import process_rewards
import pytest
from transformers import AutoModelForTokenClassification


def test_step_is_correct_if_it_continues_with_the_next_digit_and_adds_correctly():
    assert chains.step_labels("3414", "3+4=2;2+1=3;3+4=2;") == [1, 1, 1]
    assert chains.step_labels("3414", "3+4=4;4+1=0;3+4=2;3+4=2;2") == [0, 1, 0, 0]
    assert chains.step_labels("34", ";") == [0]
    assert chains.outcome_reward(["3+4=2;", "3+4=2", "2;", ""], ["2"] * 4) == [1.0, 0.0, 1.0, 0.0]
    steps = chains.write_steps("3414", chains.add_correctly, random.Random(0))
    assert (steps, chains.correct_answer("3414")) == ("3+4=2;2+1=3;3+4=2;", "2")


def test_no_number_is_both_trained_on_and_held_out():
    train, held_out = (
        {task["prompt"] for task in chains.make_tasks(200, seed=0, num_steps=3, held_out=side)}
        for side in (False, True)
    )
    assert not train & held_out


def test_process_reward_model_is_a_token_classifier(tmp_path):
    accuracy = chains.make_process_reward_model(tmp_path, seed=0, num_steps=2, num_examples=128)
    assert 0 <= accuracy <= 1
    assert AutoModelForTokenClassification.from_pretrained(tmp_path).config.num_labels == 2


def test_table_shows_the_ratio_of_samples():
    rows = [
        {"rewards": "outcome", "seed": 0, "samples": 640, "curve": {"0": 0.1, "20": 0.9}},
        {"rewards": "process", "seed": 0, "samples": 320, "curve": {"0": 0.1, "20": 0.9}},
        {"rewards": "outcome", "seed": 1, "samples": None, "curve": {"0": 0.1, "20": 0.2}},
        {"rewards": "process", "seed": 1, "samples": 320, "curve": {"0": 0.1, "20": 0.9}},
    ]
    lines = process_rewards.table(rows).splitlines()
    assert lines[2:] == ["| 0 | 640 | 320 | 2.0 |", "| 1 | over 1280 | 320 | over 4.0 |"]


@pytest.mark.slow
@pytest.mark.parametrize("rewards", process_rewards.REWARDS)
def test_each_run_takes_a_few_steps(tmp_path, rewards):
    row = process_rewards.measure(tmp_path, rewards, seed=0, sizes=process_rewards.QUICK)
    assert set(row["curve"]) == {0, 2}


@pytest.mark.slow
def test_script_measures_with_and_without_pipelining(monkeypatch, capsys):
    arguments = ["--steps", "1", "--tokens", "20", "--groups", "1", "--judge-layers", "1"]
    monkeypatch.setattr(sys, "argv", ["pipelined_scoring.py", *arguments])
    pipelined_scoring.main()
    after, pipelined, last = capsys.readouterr().out.splitlines()
    assert [json.loads(row)["pipelined"] for row in (after, pipelined)] == [False, True]
    assert last.endswith("times the throughput")
