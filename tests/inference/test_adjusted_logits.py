"""Penalties, biases and top logprobs, against their definitions."""

import numpy as np
import pytest
import torch
from engine_rig import finish_all
from talking_model import TOKENIZER, make_engine, make_model
from torch import Tensor

from millrace.core.completions import cut
from millrace.core.errors import TaskError
from millrace.core.records import Completion, Request, Sampling

PROMPT = np.array(TOKENIZER.encode("Who is it?"), np.int32)
BIASED = 70


def request(id: str, *, partial: Completion | None = None, **sampling) -> Request:
    settings = Sampling(**{"max_new_tokens": 24, **sampling})
    return Request(id=id, prompt=PROMPT, sampling=settings, seed=3, partial=partial)


def reference(tokens: np.ndarray) -> Tensor:
    """Logits [N, V] that predict each token after the prompt."""
    ids = torch.from_numpy(np.concatenate([PROMPT, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        return make_model()(ids).logits[0, len(PROMPT) - 1 : -1].float()


def adjusted(logits: Tensor, tokens: np.ndarray, sampling: Sampling) -> Tensor:
    """The same with penalties and biases, by their definition."""
    logits = logits.clone()
    for place in range(len(tokens)):
        for token in range(logits.shape[1]):
            count = int((tokens[:place] == token).sum())
            logits[place, token] -= sampling.frequency_penalty * count
            logits[place, token] -= sampling.presence_penalty * (count > 0)
        for token, bias in sampling.logit_bias:
            logits[place, token] += bias
    return logits


def assert_adjusted(done: Completion, sampling: Sampling) -> None:
    logits = adjusted(reference(done.tokens), done.tokens, sampling) / (sampling.temperature or 1)
    if sampling.top_k:
        smallest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    logprobs = logits.log_softmax(-1)
    sampled = logprobs[torch.arange(len(done.tokens)), torch.from_numpy(done.tokens).long()]
    np.testing.assert_allclose(done.logprobs, sampled, atol=1e-4)
    assert done.top is not None
    np.testing.assert_allclose(done.top.logprobs, logprobs.topk(3).values, atol=1e-4)
    if sampling.temperature == 0:
        assert (done.top.ids[:, 0] == done.tokens).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7, "temperature": 0.8},
        {"logit_bias": ((BIASED, 4.0),), "frequency_penalty": -0.5, "temperature": 0.0},
        {"presence_penalty": 1.0, "top_k": 5},
    ],
)
@pytest.mark.parametrize("decode_steps", [1, 8])
def test_logprobs_and_top_tokens_are_of_the_adjusted_distribution(settings, decode_steps):
    asked = request("a", **settings, top_logprobs=3)
    engine = make_engine(decode_steps=decode_steps)
    (done,) = finish_all(engine, [asked, request("beside")])["a"]
    assert_adjusted(done, asked.sampling)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_adjusted_sequences_do_not_change_others(decode_steps):
    (alone,) = finish_all(make_engine(), [request("b")])["b"]
    engine = make_engine(decode_steps=decode_steps)
    asked = [request("a", presence_penalty=2.0, top_logprobs=5), request("b")]
    (beside,) = finish_all(engine, asked)["b"]
    np.testing.assert_array_equal(beside.tokens, alone.tokens)
    assert beside.top is None


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"temperature": 0.0}])
@pytest.mark.parametrize("fast_layers", [False, True])
def test_gpu_engine_adjusts_logits_inside_the_decode_loop(settings, fast_layers):
    bias = ((BIASED, 1.5),)
    asked = request("a", frequency_penalty=0.8, logit_bias=bias, top_logprobs=3, **settings)
    engine = make_engine(device="cuda", decode_steps=8, fast_layers=fast_layers)
    (done,) = finish_all(engine, [asked, request("beside", **settings)])["a"]
    assert_adjusted(done, asked.sampling)


def test_interrupted_completion_resumes_with_its_penalties_and_top_tokens():
    settings = {"frequency_penalty": 1.0, "top_logprobs": 2}
    (whole,) = finish_all(make_engine(), [request("a", **settings)])["a"]
    partial = cut(whole, 0, 9)
    (resumed,) = finish_all(make_engine(), [request("a", partial=partial, **settings)])["a"]
    np.testing.assert_array_equal(resumed.tokens, whole.tokens)
    assert resumed.top is not None
    assert whole.top is not None
    np.testing.assert_array_equal(resumed.top.ids, whole.top.ids)


def test_bias_of_an_unknown_token_is_refused():
    with pytest.raises(TaskError, match="logit_bias has a token id outside"):
        make_engine().add_request(request("a", logit_bias=((10**6, 1.0),)))
