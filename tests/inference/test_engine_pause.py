"""Pause and resume of an EngineWorker; a scripted link decides which call arrives when."""

from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import assert_same, finish_all, make_engine, make_request, weights
from scripted_link import Batch, ScriptedLink

from millrace.cluster.messages import (
    AbortRequests,
    Generate,
    GenerateDone,
    Message,
    Pause,
    Resume,
    Stop,
    SwapWeights,
)
from millrace.core.records import WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.worker import EngineWorker

UPDATE = WeightUpdate(
    version=1, tensors=(), num_bytes=0, checksum=0, transport="ready", location=""
)


class ReadyReceiver:
    """Weights that need no fetching."""

    def stage(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        return weights(seed=update.version)

    def forget(self) -> None:
        """Nothing is staged."""

    def close(self) -> None:
        """Nothing to let go."""


def serve(*script: Batch, receiver: Any = None, **settings: Any) -> ScriptedLink:
    """Run an engine through a script."""
    engine = make_engine(**settings)
    link = ScriptedLink(script, engine)
    worker: Any = EngineWorker(
        link,  # pyright: ignore[reportArgumentType]
        engine=engine,
        receiver=receiver or ReadyReceiver(),
        timeline=Timeline("engine-0"),
    )
    worker.serve()
    return link


def test_paused_engine_samples_no_token_until_resumed():
    link = serve([Generate(request=make_request())], [], [Pause()], [], [], [Resume()], [])
    assert link.tokens == [0, 1, 2, 2, 2, 2, 3, 4]
    assert ("paused", False) in link.spans


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_completion_paused_after_every_token_equals_uninterrupted_one(sampling):
    request = make_request(n=2, max_new_tokens=12, **sampling)
    expected = finish_all(make_engine(), [request])[request.id]
    link = serve([Generate(request=request)], *[[Pause()], [], [Resume()]] * 16)
    for completion, same in zip(link.calls_of(Generate)[0].completions(), expected, strict=True):
        assert_same(completion, same)


def test_paused_engine_answers_every_call():
    late = make_request("late", max_new_tokens=3, temperature=0.0)
    polls: list[list[Message]] = [[] for _ in range(8)]
    link = serve(
        [Generate(request=make_request("early"))],
        [Pause()],
        [AbortRequests(ids=["early"])],
        [Pause()],
        [Generate(request=late)],
        [Resume()],
        *polls,
    )
    early, last = [call for call in link.calls if isinstance(call.message, Generate)]
    assert isinstance(early.replies[0], GenerateDone)
    assert [one.finish for one in early.replies[0].completions.values()] == ["abort"]
    assert len(last.replies) == 1
    assert all(len(call.replies) == 1 for call in link.calls)
    assert link.tokens[:6] == [0, 1, 1, 1, 1, 1]


def test_paused_engine_accepts_new_weights():
    link = serve([Generate(request=make_request())], [Pause()], [SwapWeights(update=UPDATE)])
    assert link.reply_to(SwapWeights).version == 1
    assert link.tokens == [0, 1, 1, 1]
    assert ("swap", True) in link.spans


@pytest.mark.parametrize(
    "urgent", [Pause(), SwapWeights(update=UPDATE), AbortRequests(ids=["other"])]
)
def test_launch_continues_for_new_requests_and_ends_for_other_calls(urgent):
    requests = [make_request(name, max_new_tokens=60) for name in ("early", "late")]
    early, late = [Generate(request=request) for request in requests]
    link = serve([early], [late], [urgent], [AbortRequests(ids=["early", "late"])], decode_steps=32)
    (call,) = link.calls_of(type(urgent))[:1]
    assert call.tokens_at_reply is not None
    assert 1 < call.tokens_at_reply < 16  # fewer than the 32 steps of a whole launch


def test_paused_engine_stops_on_request():
    link = serve([Generate(request=make_request())], [Pause()], [])
    assert link.reply_to(Stop) is None
    assert np.diff(link.tokens).tolist() == [1, 0, 0]
