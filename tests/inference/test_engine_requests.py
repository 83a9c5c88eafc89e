"""How requests begin and end: refusals, eos, stop strings, limits, aborts."""

import dataclasses

import numpy as np
import pytest
import torch
from engine_rig import (
    EOS,
    LETTERS,
    Collected,
    assert_same,
    finish_all,
    make_engine,
    make_request,
    prompt_of,
    weights,
)

from millrace.core.errors import RunFailed, TaskError
from millrace.core.records import Completion, Request, Sampling


def sampled(*, eos_ids: tuple[int, ...] = (), **sampling) -> Completion:
    """Always the same tokens; hot, so that they vary."""
    request = make_request(temperature=3.0, seed=1, **sampling)
    return finish_all(make_engine(eos_ids=eos_ids), [request])["r"][0]


def letters(tokens: np.ndarray) -> str:
    return "".join(LETTERS[token - 3] if token >= 3 else "" for token in tokens)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make_request(prompt=40), r"has 40 tokens, and the context of 32 .* engine.max_context"),
        (make_request(prompt=32), "has 32 tokens"),
        (make_request(prompt=np.empty(0, dtype=np.int32)), "empty prompt"),
        (make_request(prompt=np.array([3, 64], dtype=np.int32)), r"outside 0\.\.63"),
        (make_request(prompt=np.array([3, -1], dtype=np.int32)), r"outside 0\.\.63"),
        (make_request(n=0), "n and max_new_tokens of at least 1"),
        (make_request(stop=("",)), "no empty stop string"),
    ],
)
def test_request_that_can_never_be_served_is_refused(request_: Request, reason: str):
    engine = make_engine(max_context=32)
    with pytest.raises(TaskError, match=reason):
        engine.add_request(request_)
    assert not engine.has_work
    assert len(finish_all(engine, [make_request()])["r"]) == 1


def test_context_is_bounded_by_number_of_blocks():
    engine = make_engine(num_blocks=5, block_tokens=4)
    with pytest.raises(TaskError, match=r"20 tokens, and the context of 20 .*options.kv_bytes"):
        engine.add_request(make_request(prompt=20))
    (completion,) = finish_all(engine, [make_request(prompt=19)])["r"]
    assert len(completion.tokens) == 1


def test_duplicate_request_id_is_refused():
    engine = make_engine()
    engine.add_request(make_request())
    with pytest.raises(TaskError, match="already here"):
        engine.add_request(make_request())
    assert len(finish_all(engine)["r"]) == 1
    assert len(finish_all(engine, [make_request()])["r"]) == 1


def test_completion_finishes_by_length_at_max_new_tokens():
    completion = sampled(max_new_tokens=5)
    assert (completion.finish, len(completion.tokens)) == ("length", 5)
    assert completion.text == letters(completion.tokens)


def test_completion_finishes_by_length_at_end_of_context():
    engine = make_engine(max_context=32, eos_ids=())
    (completion,) = finish_all(engine, [make_request(prompt=25, max_new_tokens=100)])["r"]
    assert (completion.finish, len(completion.tokens)) == ("length", 7)


def test_eos_token_is_in_tokens_but_not_in_text():
    free = sampled(max_new_tokens=12)
    at = 4
    assert free.tokens[at] not in free.tokens[:at]
    stopped = sampled(max_new_tokens=12, eos_ids=(EOS, int(free.tokens[at])))
    assert stopped.finish == "stop"
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: at + 1])
    assert stopped.text == letters(free.tokens[:at])


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_stop_string_ends_completion_and_is_not_in_text(at: int, size: int):
    free = sampled(max_new_tokens=12)
    stop = letters(free.tokens[at : at + size])
    assert letters(free.tokens).find(stop) == at
    stopped = sampled(max_new_tokens=12, stop=("no such string", stop))
    assert stopped.finish == "stop"
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: at + size])
    assert stopped.text == letters(free.tokens[:at])


def test_stop_string_can_be_a_special_token():
    engine = make_engine(eos_ids=())
    request = make_request(n=8, max_new_tokens=100, stop=("<eos>",), temperature=1.5)
    stopped = [c for c in finish_all(engine, [request])["r"] if c.finish == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.tokens[-1] == EOS
        assert EOS not in completion.tokens[:-1]
        assert "<eos>" not in completion.text


def test_abort_returns_running_waiting_and_unstarted_members():
    engine = make_engine(max_sequences=3, eos_ids=())
    engine.add_request(make_request("running", n=5))
    engine.add_request(make_request("waiting", prompt=9, n=2))
    for _ in range(4):
        engine.step()
    aborted = {
        f.id: f.completions.values() for f in engine.abort(["waiting", "running", "unknown"])
    }
    assert [len(c.tokens) for c in aborted["running"]] == [4, 4, 4, 0, 0]
    assert [len(c.tokens) for c in aborted["waiting"]] == [0, 0]
    assert {c.finish for completions in aborted.values() for c in completions} == {"abort"}
    assert not engine.has_work
    assert engine.stats().free_blocks == 256


def test_abort_keeps_finished_members():
    engine = make_engine(max_sequences=1, eos_ids=())
    engine.add_request(make_request(n=2, max_new_tokens=3))
    collected = Collected()
    for _ in range(4):
        collected.add(engine.step())
    collected.add(engine.abort(["r"]))
    first, second = collected.by_request()["r"]
    assert (first.finish, len(first.tokens)) == ("length", 3)
    assert (second.finish, len(second.tokens)) == ("abort", 1)


@pytest.mark.parametrize(
    ("change", "finish"),
    [
        ({"max_new_tokens": 8}, "length"),
        ({"max_new_tokens": 16, "stop": True}, "stop"),
        ({"max_new_tokens": 16, "eos": True}, "stop"),
    ],
)
def test_resuming_an_ended_completion_returns_it_without_computing(change, finish: str):
    partial = sampled(max_new_tokens=8)
    stop = (letters(partial.tokens[-2:]),) if change.pop("stop", False) else ()
    eos_ids = (int(partial.tokens[-1]),) if change.pop("eos", False) else ()
    engine = make_engine(eos_ids=eos_ids)
    request = Request(
        id="again",
        prompt=prompt_of(6),
        sampling=Sampling(temperature=3.0, stop=stop, **change),
        partial=partial,
    )
    (completion,) = finish_all(engine, [request])["again"]
    assert completion.finish == finish
    np.testing.assert_array_equal(completion.tokens, partial.tokens)
    assert engine.stats().prefill_tokens == 0


def resume(partial: Completion, **request) -> Request:
    return dataclasses.replace(make_request(**request), id="again", partial=partial)


def test_request_can_resume_only_one_completion():
    partial = sampled(max_new_tokens=2)
    with pytest.raises(TaskError, match="resumes one completion but asks 2"):
        make_engine().add_request(resume(partial, n=2))


def test_completion_cannot_be_resumed_with_other_truncation():
    partial = sampled(max_new_tokens=2)
    with pytest.raises(TaskError, match="sampled with other truncation"):
        make_engine().add_request(resume(partial, top_k=3))


def test_completion_aborted_before_its_first_token_resumes_from_prompt():
    engine = make_engine(eos_ids=())
    engine.add_request(make_request(top_k=3))
    ((partial,),) = (aborted.completions.values() for aborted in engine.abort(["r"]))
    assert len(partial.tokens) == 0
    (completion,) = finish_all(engine, [resume(partial, top_k=3)])["again"]
    assert completion.kept is not None
    assert completion.kept.offsets.tolist() == list(range(0, 3 * 16 + 1, 3))


def test_weights_with_nan_logits_fail_the_run():
    engine = make_engine()
    broken = weights(seed=1)
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], torch.nan)
    engine.swap(broken, version=7)
    engine.add_request(make_request())
    with pytest.raises(
        RunFailed, match=r"Version 7 of the weights gives logits that are not finite"
    ):
        engine.step()


def test_long_prompt_is_prefilled_in_chunks_while_others_decode():
    engine = make_engine(prefill_tokens=8, eos_ids=())
    engine.add_request(make_request("short", max_new_tokens=30))
    engine.step()
    engine.add_request(make_request("long", prompt=60))
    for step in range(1, 8):
        engine.step()
        stats = engine.stats()
        assert stats.prefill_tokens == 6 + 8 * step
        assert stats.generated_tokens == 1 + step
    engine.step()
    assert engine.stats().prefill_tokens == 6 + 60
    assert engine.stats().generated_tokens == 1 + 8 + 1


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_prefill_that_runs_out_of_memory_is_split(decode_steps: int):
    request = make_request("a", prompt=100)
    expected = finish_all(make_engine(eos_ids=()), [request])["a"][0]
    engine = make_engine(eos_ids=(), decode_steps=decode_steps, prefill_tokens=64)
    embedding = engine._model.get_input_embeddings()
    embedding.register_forward_pre_hook(out_of_memory_beyond(20))
    assert_same(finish_all(engine, [request])["a"][0], expected)


def test_states_that_a_failed_pass_advanced_are_computed_again():
    requests = [make_request(str(i), prompt=prompt_of(9 + 30 * i), seed=i) for i in range(3)]
    expected = finish_all(make_engine("qwen3_next", eos_ids=()), requests)
    engine = make_engine("qwen3_next", eos_ids=())
    passes = iter(range(99))

    def fail_once(*_: object) -> None:
        if next(passes) == 5:
            raise torch.OutOfMemoryError("a stand-in for a full GPU")

    # The first layer has a state and has advanced it, when the second one fails.
    engine._model.model.layers[-1].register_forward_pre_hook(fail_once)
    done = finish_all(engine, requests)
    for id, (completion,) in expected.items():
        assert_same(done[id][0], completion)


def test_pass_that_never_fits_into_memory_fails_the_run():
    engine = make_engine()
    engine._model.get_input_embeddings().register_forward_pre_hook(out_of_memory_beyond(3))
    with pytest.raises(RunFailed, match=r"does not fit into the memory .*engine\.options\.kv_"):
        finish_all(engine, [make_request("a", prompt=100)])


def out_of_memory_beyond(num_tokens: int):
    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].numel() > num_tokens:
            raise torch.OutOfMemoryError("a stand-in for a full GPU")

    return check


def test_request_skips_as_many_queued_requests_as_its_priority():
    engine = make_engine(max_sequences=1)
    for name, priority in [("a", 0), ("b", 0), ("c", 0), ("d", 2), ("e", 1)]:
        engine.add_request(
            dataclasses.replace(make_request(name, max_new_tokens=2), priority=priority)
        )
    ended = []
    while engine.has_work:
        ended += [finished.id for finished in engine.step()]
    # No sequence has a slot before the first step; d skips c and ties with b, e ties with c.
    assert ended == ["a", "b", "d", "c", "e"]
