"""lm-evaluation-harness and inspect-ai against `millrace serve` with a tiny random model.

`make test-clients` installs them in an environment of their own.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from chat_model import chat_tokenizer, make_chat_model
from server_process import KEY, ServerProcess, server_process

pytest.importorskip("lm_eval", reason="make test-clients installs it")

ROWS = [
    {"question": "2 + 3 =", "choices": [" 5", " 6", " apple"], "answer": 0},
    {"question": "The sky is", "choices": [" blue", " x"], "answer": 1},
    {"question": "a b c", "choices": [" d", " e", " f", " g"], "answer": 2},
]
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
WRITING = """
task: tiny_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"), max_context=2048)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(model, logs=tmp_path_factory.mktemp("logs")) as process:
        yield process


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choices", CHOICES), ("writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(rows=rows))
    return tmp_path


def loglikelihoods(model: Path) -> list[list[float]]:
    """Of the choices of each row, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), chat_tokenizer()
    found = []
    for row in ROWS:
        found.append([])
        for choice in row["choices"]:
            num_before = len(tokenizer.encode(row["question"]))
            ids = torch.tensor(tokenizer.encode(row["question"] + choice))[None]
            with torch.no_grad():
                logprobs = network(ids).logits[0, :-1].log_softmax(-1)
            of_tokens = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
            found[-1].append(float(of_tokens[num_before - 1 :].sum()))
    return found


def test_lm_evaluation_harness_computes_the_likelihoods_of_the_model(
    server: ServerProcess, model: Path, tasks: Path
):
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(model),
            "max_length": 2047,
        },
        tasks=["tiny_choices"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    expected = loglikelihoods(model)
    samples = sorted(results["samples"]["tiny_choices"], key=lambda sample: sample["doc_id"])
    for sample, numbers in zip(samples, expected, strict=True):
        found = [float(response[0][0]) for response in sample["resps"]]
        np.testing.assert_allclose(found, numbers, atol=1e-3)
    right = [
        np.argmax(numbers) == row["answer"] for numbers, row in zip(expected, ROWS, strict=True)
    ]
    assert results["results"]["tiny_choices"]["acc,none"] == pytest.approx(np.mean(right))


def test_lm_evaluation_harness_samples_chats(server: ServerProcess, tasks: Path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={"model": "tiny", "base_url": f"{server.url}/v1/chat/completions"},
        tasks=["tiny_writing"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    samples = results["samples"]["tiny_writing"]
    assert len(samples) == len(ROWS)
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)


def test_inspect_evaluates_a_task(server: ServerProcess, tmp_path: Path):
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes

    sampling = {"max_tokens": 16, "temperature": 0.0, "seed": 1}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        answers = [
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": row["question"]}], **sampling
            )
            .choices[0]
            .message.content
            for row in ROWS
        ]
    assert all(answers)
    targets = [*answers[:-1], "what the model does not say"]
    samples = [
        Sample(input=row["question"], target=target)
        for row, target in zip(ROWS, targets, strict=True)
    ]
    task = inspect_ai.Task(dataset=samples, scorer=includes())
    policy = get_model("openai-api/millrace/tiny", base_url=f"{server.url}/v1", api_key=KEY)
    config = {"log_dir": str(tmp_path), "display": "none"}
    (log,) = inspect_ai.eval(task, model=policy, **sampling, **config)
    assert log.status == "success", log.error
    assert log.samples is not None
    assert len(log.samples) == len(ROWS)
    assert log.results is not None
    accuracy = log.results.scores[0].metrics["accuracy"].value
    assert accuracy == pytest.approx(1 - 1 / len(ROWS))
