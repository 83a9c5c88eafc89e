"""Interrupt models in the engine process's body: the test's link decides what arrives when."""

import dataclasses
import threading
from typing import Any

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
from millrace.inference.interrupt import INTERRUPTS
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
    return {
        call.message.request.id: call.replies[0].completions for call in link.calls_of(Generate)
    }


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
PATHS = pytest.mark.parametrize("round_steps", [1, 4], ids=["steps", "rounds"])


@PATHS
@pytest.mark.parametrize("model", INTERRUPTS)
def test_a_newer_update_takes_the_place_of_one_that_has_not_landed(model, round_steps):
    mailbox = Mailbox()
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [],
        [swap_to(2), lambda: mailbox.open(1), lambda: mailbox.open(2)],
        round_steps=round_steps,
        **TWO,
    )
    assert [call.replies[0].version for call in link.calls_of(SwapWeights)] == [2, 2]
    assert {v for group in completions_of(link).values() for c in group for v in c.versions} <= {
        0,
        2,
    }
    assert_undisturbed(link)


@PATHS
@pytest.mark.parametrize("model", INTERRUPTS)
def test_who_streams_has_heard_all_of_a_request_when_it_is_answered(model, round_steps):
    mailbox = Mailbox()
    link = serve(
        model,
        mailbox,
        [Generate(request=RUNNING, stream=True), Generate(request=WAITING, stream=True)],
        [],
        [swap_to(1), lambda: mailbox.open(1)],
        [AbortRequests(ids=["waiting"])],
        round_steps=round_steps,
        **TWO,
    )
    for call in link.calls_of(Generate):
        call.heard.assert_heard(call.replies[0].completions)


@PATHS
@pytest.mark.parametrize("model", INTERRUPTS)
def test_a_refused_update_costs_nobody_anything(model, round_steps):
    mailbox = Mailbox(refused=1)
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [lambda: mailbox.open(1)],
        round_steps=round_steps,
        **TWO,
    )
    (swap,) = link.calls_of(SwapWeights)
    assert isinstance(swap.replies[0], WeightError)
    assert all(c.finish == "length" for group in completions_of(link).values() for c in group)
    assert_undisturbed(link)


@pytest.mark.parametrize("model", ["swap", "abort"])
def test_weights_are_fetched_while_a_round_goes_on(model):
    mailbox = Mailbox()

    def opened() -> None:
        assert mailbox.is_asked.wait(20)
        mailbox.open(1)

    prefill: list[Batch] = [[Generate(request=RUNNING)], []]
    link = serve(model, mailbox, *prefill, [swap_to(1)], [opened], round_steps=8)
    # What a round made counts when it ends: the update came, and was asked for, inside of one.
    assert link.tokens[2] == link.tokens[3] < link.tokens[4]
    assert link.reply_to(SwapWeights).version == 1
    assert_undisturbed(link)


def test_an_update_that_is_refused_ends_a_drain_before_its_time():
    mailbox = Mailbox(refused=1)
    mailbox.open(1)
    long = make_request("long", max_new_tokens=100)
    link = serve("drain", mailbox, [Generate(request=long)], [swap_to(1)])
    (swap,) = link.calls_of(SwapWeights)
    assert isinstance(swap.replies[0], WeightError)
    assert swap.tokens_at_reply < 100


@PATHS
def test_parked_sequences_make_no_token_until_the_weights_are_there(round_steps):
    mailbox = Mailbox()
    link = serve(
        "save",
        mailbox,
        BOTH,
        [swap_to(1)],
        *[[]] * 5,
        [lambda: mailbox.open(1)],
        round_steps=round_steps,
        **TWO,
    )
    (swap,) = link.calls_of(SwapWeights)
    assert swap.tokens_at_reply == link.tokens[1] == link.tokens[7]
    assert ("waiting for weights", False) in link.spans
    assert_undisturbed(link)


def test_an_engine_without_sequences_is_not_parked():
    mailbox = Mailbox()
    link = serve("save", mailbox, [swap_to(1)], [], [lambda: mailbox.open(1)])
    assert isinstance(link.reply_to(SwapWeights), Swapped)
    assert {name for name, busy in link.spans if not busy} <= {"no work"}


@PATHS
@pytest.mark.parametrize("model", ["drain", "barrier"])
def test_a_draining_engine_begins_nothing_and_lands_when_it_is_empty(model, round_steps):
    mailbox = Mailbox()
    mailbox.open(1)
    late = make_request("late", seed=9, max_new_tokens=3)
    link = serve(
        model,
        mailbox,
        BOTH,
        [swap_to(1)],
        [Generate(request=late)],
        round_steps=round_steps,
        **TWO,
    )
    done = completions_of(link)
    (swap,) = link.calls_of(SwapWeights)
    assert swap.tokens_at_reply == 2 * 16
    assert {int(v) for c in done["running"] for v in c.versions} == {0}
    assert {int(v) for id in ("waiting", "late") for c in done[id] for v in c.versions} == {1}
    assert ("drain", True) in link.spans


def test_an_engine_that_has_drained_waits_for_the_weights():
    mailbox = Mailbox()
    link = serve("drain", mailbox, BOTH, [swap_to(1)], *[[]] * 40, [lambda: mailbox.open(1)], **TWO)
    assert link.tokens[-1] == 3 * 16
    assert link.tokens[30] == link.tokens[41] == 2 * 16
    assert ("drained", False) in link.spans


@PATHS
def test_what_was_interrupted_by_new_weights_says_so_and_what_its_caller_ended_does_not(
    round_steps,
):
    mailbox = Mailbox()
    link = serve(
        "abort",
        mailbox,
        BOTH,
        [swap_to(1), AbortRequests(ids=["waiting"])],
        [lambda: mailbox.open(1)],
        round_steps=round_steps,
        **TWO,
    )
    done = completions_of(link)
    assert [completion.finish for completion in done["waiting"]] == ["abort"]
    finishes = {completion.finish for completion in done["running"]}
    assert finishes in ({"interrupt"}, {"length"})  # it may have been faster than the weights


@pytest.mark.parametrize("model", ["save", "drain"])
def test_pausing_meanwhile_changes_no_completion(model):
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


def test_expire_answers_the_requests_it_ends():
    old = dataclasses.replace(make_request("old"), expires=True)
    link = serve("swap", Mailbox(), [Generate(request=old)], [Expire(before=1)])
    (completion,) = completions_of(link)["old"]
    assert (completion.finish, completion.versions.tolist()) == ("expire", [0])
    assert link.reply_to(Expire) is None
