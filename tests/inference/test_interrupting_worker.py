"""Interrupt modes of an EngineWorker; a scripted link decides which call arrives when."""

import dataclasses
import threading
from typing import Any, get_args

import pytest
import torch
from engine_rig import assert_same, finish_all, make_engine, make_request, weights
from scripted_link import Batch, ScriptedLink

from millrace.cluster.messages import (
    AbortRequests,
    Expire,
    Generate,
    Pause,
    Resume,
    Swapped,
    SwapWeights,
)
from millrace.config import Interrupt
from millrace.core.errors import WeightError
from millrace.core.records import Completion, WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.worker import EngineWorker

TWO = {"max_sequences": 2}  # the third sequence waits
RUNNING = make_request("running", n=2)
WAITING = make_request("waiting", seed=5)


class Mailbox:
    """Weights by version, the same as the engine's own; each arrives when it is opened."""

    def __init__(self, *, refused: int | None = None) -> None:
        self._opened = {version: threading.Event() for version in (1, 2)}
        self._refused = refused
        self.is_asked = threading.Event()

    def open(self, version: int) -> None:
        self._opened[version].set()

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        self.is_asked.set()
        assert self._opened[update.version].wait(20)
        if update.version == self._refused:
            raise WeightError("damaged")
        return weights(seed=0)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.set()


def swap_to(version: int) -> SwapWeights:
    return SwapWeights(
        update=WeightUpdate(
            version=version, tensors=(), num_bytes=0, checksum=0, transport="", location=""
        )
    )


def serve(model: Interrupt, mailbox: Mailbox, *script: Batch, **settings: Any) -> ScriptedLink:
    engine = make_engine(eos_ids=(), **settings)
    link = ScriptedLink(script, engine, until=(SwapWeights, Generate))
    worker = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=engine,
        receiver=mailbox,
        timeline=Timeline("engine-0"),
        interrupt=model,
    )
    worker.serve()
    assert engine.stats().free_blocks == 256
    return link


def completions_of(link: ScriptedLink) -> dict[str, list[Completion]]:
    return {call.message.request.id: call.completions() for call in link.calls_of(Generate)}


def assert_undisturbed(link: ScriptedLink) -> None:
    expected = finish_all(make_engine(eos_ids=()), [RUNNING, WAITING])
    for id, completions in completions_of(link).items():
        for ours, theirs in zip(completions, expected[id], strict=True):
            count = len(ours.tokens) if ours.finish == "interrupt" else len(theirs.tokens)
            assert_same(ours, cut(theirs, count))


def cut(completion: Completion, count: int) -> Completion:
    return dataclasses.replace(
        completion, tokens=completion.tokens[:count], logprobs=completion.logprobs[:count]
    )


BOTH: Batch = [Generate(request=RUNNING), Generate(request=WAITING)]
PATHS = pytest.mark.parametrize("decode_steps", [1, 4], ids=["steps", "loop"])


@PATHS
@pytest.mark.parametrize("model", get_args(Interrupt))
def test_newer_update_replaces_one_that_has_not_landed(model, decode_steps):
    mailbox = Mailbox()
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [],
        [swap_to(2), lambda: mailbox.open(1), lambda: mailbox.open(2)],
        decode_steps=decode_steps,
        **TWO,
    )
    assert [call.replies[0].version for call in link.calls_of(SwapWeights)] == [2, 2]
    assert {v for group in completions_of(link).values() for c in group for v in c.versions} <= {
        0,
        2,
    }
    assert_undisturbed(link)


@PATHS
@pytest.mark.parametrize("model", get_args(Interrupt))
def test_all_chunks_arrive_before_the_reply(model, decode_steps):
    mailbox = Mailbox()
    link = serve(
        model,
        mailbox,
        [Generate(request=RUNNING, stream=True), Generate(request=WAITING, stream=True)],
        [],
        [swap_to(1), lambda: mailbox.open(1)],
        [AbortRequests(ids=["waiting"])],
        decode_steps=decode_steps,
        **TWO,
    )
    for call in link.calls_of(Generate):
        call.listener.assert_received(call.completions())


@PATHS
@pytest.mark.parametrize("model", get_args(Interrupt))
def test_refused_update_does_not_affect_requests(model, decode_steps):
    mailbox = Mailbox(refused=1)
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [lambda: mailbox.open(1)],
        decode_steps=decode_steps,
        **TWO,
    )
    (swap,) = link.calls_of(SwapWeights)
    assert isinstance(swap.replies[0], WeightError)
    assert all(c.finish == "length" for group in completions_of(link).values() for c in group)
    assert_undisturbed(link)


@pytest.mark.parametrize("model", ["swap", "abort"])
def test_weights_are_staged_during_a_launch(model):
    mailbox = Mailbox()

    def opened() -> None:
        assert mailbox.is_asked.wait(20)
        mailbox.open(1)

    prefill: list[Batch] = [[Generate(request=RUNNING)], []]
    link = serve(model, mailbox, *prefill, [swap_to(1)], [opened], decode_steps=8)
    # Tokens of a launch count when it ends: the update arrived during the launch.
    assert link.tokens[2] == link.tokens[3] < link.tokens[4]
    assert link.reply_to(SwapWeights).version == 1
    assert_undisturbed(link)


def test_refused_update_ends_drain_early():
    mailbox = Mailbox(refused=1)
    mailbox.open(1)
    long = make_request("long", max_new_tokens=100)
    link = serve("drain", mailbox, [Generate(request=long)], [swap_to(1)])
    (swap,) = link.calls_of(SwapWeights)
    assert isinstance(swap.replies[0], WeightError)
    assert swap.tokens_at_reply < 100


@PATHS
def test_saved_sequences_sample_no_token_until_weights_land(decode_steps):
    mailbox = Mailbox()
    link = serve(
        "save",
        mailbox,
        BOTH,
        [swap_to(1)],
        *[[]] * 5,
        [lambda: mailbox.open(1)],
        decode_steps=decode_steps,
        **TWO,
    )
    (swap,) = link.calls_of(SwapWeights)
    assert swap.tokens_at_reply == link.tokens[1] == link.tokens[7]
    assert ("waiting for weights", False) in link.spans
    assert_undisturbed(link)


def test_engine_without_sequences_does_not_report_waiting():
    mailbox = Mailbox()
    link = serve("save", mailbox, [swap_to(1)], [], [lambda: mailbox.open(1)])
    assert isinstance(link.reply_to(SwapWeights), Swapped)
    assert {name for name, busy in link.spans if not busy} <= {"no work"}


@PATHS
@pytest.mark.parametrize("model", ["drain", "barrier"])
def test_draining_engine_starts_no_sequence_and_lands_when_empty(model, decode_steps):
    mailbox = Mailbox()
    mailbox.open(1)
    late = make_request("late", seed=9, max_new_tokens=3)
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [Generate(request=late)],
        decode_steps=decode_steps,
        **TWO,
    )
    done = completions_of(link)
    (swap,) = link.calls_of(SwapWeights)
    assert swap.tokens_at_reply == 2 * 16
    assert {int(v) for c in done["running"] for v in c.versions} == {0}
    assert {int(v) for id in ("waiting", "late") for c in done[id] for v in c.versions} == {1}
    assert ("drain", True) in link.spans


def test_drained_engine_waits_for_weights():
    mailbox = Mailbox()
    link = serve("drain", mailbox, BOTH, [swap_to(1)], *[[]] * 40, [lambda: mailbox.open(1)], **TWO)
    assert link.tokens[-1] == 3 * 16
    assert link.tokens[30] == link.tokens[41] == 2 * 16
    assert ("drained", False) in link.spans


@PATHS
def test_interrupt_and_abort_have_different_finish(
    decode_steps,
):
    mailbox = Mailbox()
    link = serve(
        "abort",
        mailbox,
        BOTH,
        [swap_to(1), AbortRequests(ids=["waiting"])],
        [lambda: mailbox.open(1)],
        decode_steps=decode_steps,
        **TWO,
    )
    done = completions_of(link)
    assert [completion.finish for completion in done["waiting"]] == ["abort"]
    finishes = {completion.finish for completion in done["running"]}
    assert finishes in ({"interrupt"}, {"length"})  # it may have been faster than the weights


@pytest.mark.parametrize("model", ["save", "drain"])
def test_pausing_during_update_changes_no_completion(model):
    mailbox = Mailbox()
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [Pause()],
        [lambda: mailbox.open(1)],
        [],
        [Resume()],
        **TWO,
    )
    assert_undisturbed(link)


def test_expire_answers_ended_requests():
    old = dataclasses.replace(make_request("old"), expires=True)
    link = serve("swap", Mailbox(), [Generate(request=old)], [Expire(before=1)])
    (completion,) = completions_of(link)["old"]
    assert (completion.finish, completion.versions.tolist()) == ("expire", [0])
    assert link.reply_to(Expire) is None
