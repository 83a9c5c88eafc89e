from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from millrace.demo.model import (
    SORTED_SHARE,
    build_model,
    build_tokenizer,
    careless_examples,
    make_model,
    warm_start,
)
from millrace.demo.task import make_tasks


def test_tokenizer_round_trips_every_task() -> None:
    tokenizer = build_tokenizer()
    for task in make_tasks(50, seed=0):
        for text in task.values():
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_and_so_is_the_instruction() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.tokenize("sort 305=") == ["sort ", "3", "0", "5", "="]


def test_decoding_can_leave_out_the_end_token() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode("035<eos>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "035"


def test_the_model_has_about_a_million_parameters() -> None:
    assert 0.9e6 < build_model(build_tokenizer(), seed=0).num_parameters() < 1.1e6


def test_the_directory_loads_like_any_model_of_the_hub(tmp_path: Path) -> None:
    make_model(tmp_path, seed=0, num_examples=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer("sort 21=", return_tensors="pt")["input_ids"]
    completion = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(completion) != ""


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make_model(tmp_path / name, seed=seed, num_examples=64)
        torch.rand(7)
    first, again, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other")
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_making_a_model_leaves_random_state_and_threads_as_they_were(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    make_model(tmp_path, seed=0, num_examples=64)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_teacher_sorts_some_numbers_and_copies_the_others() -> None:
    kinds = Counter()
    for prompt, answer in careless_examples(2000, seed=0):
        number = prompt.removeprefix("sort ").removesuffix("=")
        assert answer in (number, "".join(sorted(number)))
        kinds["sorted" if answer != number else "copied"] += 1
    # Some numbers are in order already, and then both kinds look the same.
    assert SORTED_SHARE - 0.06 < kinds["sorted"] / 2000 < SORTED_SHARE


def test_the_warm_start_lowers_the_loss_and_reports_every_step() -> None:
    losses: list[float] = []
    steps: list[int] = []

    def on_step(step: int, loss: float) -> None:
        steps.append(step)
        losses.append(loss)

    examples = careless_examples(40 * 32, seed=0)
    warm_start(
        _tiny_model(), build_tokenizer(), examples=examples, learning_rate=1e-2, on_step=on_step
    )
    assert steps == list(range(1, 41))
    assert losses[-1] < losses[0] - 0.5


def test_padding_and_prompts_do_not_count_in_the_loss() -> None:
    tokenizer, model = build_tokenizer(), _tiny_model()
    examples = [("sort 21=", "12"), ("sort 7654321=", "1234567")]
    logprobs = []
    for prompt, answer in examples:
        given, wanted = (
            tokenizer.encode(prompt),
            [*tokenizer.encode(answer), tokenizer.eos_token_id],
        )
        with torch.no_grad():
            logits = model(torch.tensor([given + wanted])).logits[0]
        predicted = logits.log_softmax(-1)[len(given) - 1 : -1]
        logprobs += [float(row[token]) for row, token in zip(predicted, wanted, strict=True)]
    losses: list[float] = []
    warm_start(
        model,
        tokenizer,
        examples=examples,
        batch_size=2,
        on_step=lambda _, loss: losses.append(loss),
    )
    assert losses == [pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-5)]


def _tiny_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(build_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)
