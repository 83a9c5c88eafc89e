"""Grammar-constrained completions of a real engine with a random model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_rig import finish_all
from person_schema import FORMAT, assert_valid
from talking_model import END, TOKENIZER, make_engine, make_model

from millrace.core.records import Completion, Request, Sampling
from millrace.models.grammars import GrammarCompiler, grammar_of
from millrace.models.kept_rows import unpacked

pytest.importorskip("llguidance")

PROMPT = np.array(TOKENIZER.encode("Who is it?"), np.int32)


def request(id: str, *, guided: bool = True, n: int = 1, partial=None, **sampling) -> Request:
    grammar = grammar_of(FORMAT) if guided else None
    settings = Sampling(**{"max_new_tokens": 300, **sampling}, grammar=grammar)
    return Request(id=id, prompt=PROMPT, sampling=settings, n=n, seed=3, partial=partial)


def assert_same(ours: Completion, theirs: Completion) -> None:
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.5}])
def test_completions_follow_their_schema(sampling):
    done = finish_all(make_engine(), [request("a", n=3, **sampling)])
    for completion in done["a"]:
        assert completion.finish == "stop"
        assert_valid(completion.text)


def test_grammars_do_not_affect_other_sequences():
    free = request("free", guided=False, max_new_tokens=40)
    (alone,) = finish_all(make_engine(), [free])["free"]
    together = finish_all(make_engine(), [free, request("guided", n=2)])
    assert_same(together["free"][0], alone)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}])
def test_multi_step_decoding_follows_the_same_grammar(sampling):
    requests = [request("guided", n=2, **sampling), request("free", guided=False, **sampling)]
    expected = finish_all(make_engine(), requests)
    done = finish_all(make_engine(decode_steps=4), requests)
    for id, completions in expected.items():
        for ours, theirs in zip(done[id], completions, strict=True):
            assert_same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}])
def test_gpu_engine_follows_a_schema_beside_multi_step_decoding(sampling):
    requests = [request("guided", n=4, **sampling), request("free", guided=False, n=4, **sampling)]
    done = finish_all(make_engine(device="cuda", decode_steps=8), requests)
    for completion in done["guided"]:
        assert completion.finish == "stop"
        assert np.isfinite(completion.logprobs).all()
        assert_valid(completion.text)


def test_interrupted_completion_resumes_its_grammar():
    (whole,) = finish_all(make_engine(), [request("a")])["a"]
    at = len(whole.tokens) // 2
    partial = Completion(
        tokens=whole.tokens[:at],
        logprobs=whole.logprobs[:at],
        versions=whole.versions[:at],
        finish="interrupt",
        text="",
    )
    (resumed,) = finish_all(make_engine(), [request("a", partial=partial)])["a"]
    assert_same(resumed, whole)


def test_logprobs_are_restricted_to_the_grammar():
    (done,) = finish_all(make_engine(), [request("a", temperature=0.7)])["a"]
    model = make_model()
    ids = torch.from_numpy(np.concatenate([PROMPT, done.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float() / 0.7
    compiler = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_ids=[END])
    guide = compiler.matcher(grammar_of(FORMAT))
    assert guide is not None
    for place, token in enumerate(done.tokens.tolist()):
        words = torch.from_numpy(compiler.masks([guide], [done.tokens[:place]]))
        allowed = unpacked(words, len(TOKENIZER))[0]
        left = logits[place].masked_fill(~allowed, -torch.inf).log_softmax(-1)
        assert done.logprobs[place] == pytest.approx(float(left[token]), abs=1e-5)


def test_compiled_schemas_are_not_shared_between_salts(monkeypatch):
    compiled: list[str] = []
    compile = GrammarCompiler._compile

    def counted(self: GrammarCompiler, grammar: str, *more: str):
        compiled.append(grammar)
        return compile(self, grammar, *more)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    engine = make_engine()
    for number, (salt, expected) in enumerate([("one", 1), ("one", 1), ("two", 2), ("one", 2)]):
        finish_all(engine, [replace(request(f"{number}", max_new_tokens=1), cache_salt=salt)])
        assert len(compiled) == expected


def test_completion_that_left_its_grammar_ends():
    compiler = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_ids=[END])
    guide = compiler.matcher(grammar_of(FORMAT))
    wrong = np.array(TOKENIZER.encode("?"), np.int32)
    words = torch.from_numpy(compiler.masks([guide], [wrong]))
    assert unpacked(words, len(TOKENIZER))[0].nonzero().flatten().tolist() == [END]
