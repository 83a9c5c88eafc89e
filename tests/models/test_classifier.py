"""Values are those of a plain transformers forward pass over each sequence alone."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_classifier import make_tiny_classifier
from tiny_model import make_tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MistralConfig,
    PhimoeConfig,
)

from millrace.core.errors import ConfigError
from millrace.models import classifier as module
from millrace.models.classifier import (
    Classifier,
    ClassifierInput,
    SequenceKv,
    SequenceKvCache,
    load_classifier,
)

CLASSES = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(2, 20, size) for size in (9, 4, 14)]
ENDS = [[2, 5, 8], [3], [1, 13]]


def load(path: Path, head, *, label=None) -> Classifier:
    return load_classifier(
        str(path), head=head, label=label, dtype=torch.float32, device=torch.device("cpu")
    )


def plain_values(path: Path, head, tokens: np.ndarray, ends: list[int], label) -> list[float]:
    model = CLASSES[head].from_pretrained(path).eval()
    values = []
    with torch.no_grad():
        for end in ends:
            logits = model(input_ids=torch.tensor(tokens[None, : end + 1])).logits[0]
            logits = logits[-1] if head == "token" else logits
            values.append(float(logits[0] if label is None else logits.softmax(-1)[label]))
    return values


@pytest.mark.parametrize(
    ("architecture", "head"), list(itertools.product(["qwen3", "bert"], ["sequence", "token"]))
)
@pytest.mark.parametrize(("num_labels", "label"), [(1, None), (3, 2)])
def test_a_batch_gives_what_each_sequence_gives_alone(
    tmp_path, head, architecture, num_labels, label
):
    path = make_tiny_classifier(
        tmp_path, head=head, architecture=architecture, num_labels=num_labels
    )
    classifier = load(path, head, label=label)
    assert classifier.is_incremental == (architecture == "qwen3")
    inputs = [
        ClassifierInput(tokens=tokens, ends=ends)
        for tokens, ends in zip(SEQUENCES, ENDS, strict=True)
    ]
    if not classifier.is_incremental:
        inputs = [ClassifierInput(tokens=p.tokens, ends=[end]) for p in inputs for end in p.ends]
    found = [value for values, _ in classifier.values(inputs) for value in values]
    expected = [
        value
        for tokens, ends in zip(SEQUENCES, ENDS, strict=True)
        for value in plain_values(path, head, tokens, ends, label)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_growing_sequences_of_several_lengths_are_processed_incrementally(tmp_path, head):
    path = make_tiny_classifier(tmp_path, head=head, num_labels=2)
    classifier = load(path, head, label=1)
    known: list[SequenceKv | None] = [None] * 3
    found: list[list[float]] = [[], [], []]
    for cuts in ([3, 2, 10], [4, 4, 11], [9, 4, 14]):  # tokens that have come so far
        rows = [row for row in range(3) if known[row] is None or cuts[row] > known[row].length]
        inputs = [
            ClassifierInput(
                tokens=SEQUENCES[row][: cuts[row]],
                ends=[cuts[row] - 1],
                past=known[row],
                keep=True,
            )
            for row in rows
        ]
        for row, (values, states) in zip(rows, classifier.values(inputs), strict=True):
            known[row] = states
            found[row] += values
    ends = [[2, 3, 8], [1, 3], [9, 10, 13]]
    for row in range(3):
        expected = plain_values(path, head, SEQUENCES[row], ends[row], 1)
        np.testing.assert_allclose(found[row], expected, atol=1e-5)


def test_a_sequence_can_grow_token_by_token(tmp_path, monkeypatch):
    path = make_tiny_classifier(tmp_path, head="token", num_labels=2)
    classifier = load(path, "token", label=1)
    tokens, states, found = SEQUENCES[2], None, []
    monkeypatch.setattr(module, "_FIRST_CAPACITY", 3)  # so that it fills again and again
    for end in range(len(tokens)):
        one_input = ClassifierInput(tokens=tokens[: end + 1], ends=[end], past=states, keep=True)
        ((values, states),) = classifier.values([one_input])
        assert states is not None
        found += values
    expected = plain_values(path, "token", tokens, range(len(tokens)), 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "is_incremental"), [(PhimoeConfig, False), (MistralConfig, True)])
def test_values_of_sequences_beyond_a_window_are_those_of_transformers(
    tmp_path, kind, is_incremental
):
    """PhiMoE gives its window to the mask alone, Mistral to attention, too."""
    config = kind(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        num_labels=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    classifier = load(tmp_path, "sequence", label=1)
    assert classifier.is_incremental == is_incremental
    long = ClassifierInput(tokens=SEQUENCES[2], ends=[13])
    ((found, _),) = classifier.values([long])
    expected = plain_values(tmp_path, "sequence", SEQUENCES[2], [13], 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_values_are_those_of_the_cpu(tmp_path, dtype):
    path = make_tiny_classifier(tmp_path, head="token", num_labels=2)
    classifier = load_classifier(
        str(path), head="token", label=1, dtype=dtype, device=torch.device("cuda")
    )
    assert classifier.is_incremental
    (early, states), *_ = classifier.values(
        [ClassifierInput(tokens=tokens[:4], ends=[3], keep=True) for tokens in SEQUENCES]
    )
    (late, _), *_ = classifier.values(
        [ClassifierInput(tokens=SEQUENCES[0], ends=[5, 8], past=states)]
        + [ClassifierInput(tokens=tokens, ends=[3]) for tokens in SEQUENCES[1:]]
    )
    expected = plain_values(path, "token", SEQUENCES[0], [3, 5, 8], 1)
    np.testing.assert_allclose(
        early + late, expected, atol=1e-4 if dtype == torch.float32 else 0.02
    )


def test_a_language_model_is_refused_as_a_reward_model(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"'score.weight' among them; .* as a sequence classifier"
    ):
        load(path, "sequence")


def test_kv_cache_keeps_the_newest_entries_and_returns_each_once():
    def states(length: int) -> SequenceKv:
        made = SequenceKv()
        made.length = length
        return made

    cache = SequenceKvCache(max_tokens=10)
    one, two, three = (np.arange(n) for n in (4, 5, 6))
    cache.put(one, states(4))
    cache.put(two, states(5))
    cache.put(three, states(6))  # 15 tokens are too many: the first two go
    assert cache.take(one) is None
    assert cache.take(two) is None
    taken = cache.take(three)
    assert taken is not None
    assert taken.length == 6
    assert cache.take(three) is None
    assert cache.num_tokens == 0
