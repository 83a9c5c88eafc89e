"""The process of a reward model; nothing is faked but a full GPU."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
import torch
from queue_link import FakeLink, run_beside
from tiny_classifier import make_tiny_classifier
from torch.nn.modules.module import register_module_forward_pre_hook

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.messages import ReadSteps, StartRewardModel, StepReading, Stop
from millrace.cluster.supervision.pool import WorkerPool
from millrace.core.errors import ConfigError, ScoreError
from millrace.scoring.reward_models.reward_model import RewardModelProcess, RewardModelSettings
from millrace.scoring.reward_models.worker import RewardModelWorker


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [
        child for child in children if "millrace.scoring.reward_models.worker" in child.cmdline()
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_classifier(tmp_path_factory.mktemp("prm"), head="token", num_labels=1)


@pytest.fixture
async def worker_pool(tmp_path, warm_fork_server):
    async with (
        Hub(log_dir=tmp_path, on_event=lambda *_: None, preload=PRELOAD) as hub,
        WorkerPool(hub.launch) as worker_pool,
    ):
        yield worker_pool


def make_process(worker_pool: WorkerPool, model, **settings) -> RewardModelProcess:
    given = RewardModelSettings(model=str(model), template="ids", **settings)
    start = given.checked(scorer="steps").start_message(
        device="cpu", head="token", is_whole=False, kept_tokens=1000
    )
    return RewardModelProcess("steps", start=start, worker_pool=worker_pool, start_timeout_s=60.0)


def reading(length: int, *ends: int, **settings) -> StepReading:
    tokens = (np.arange(length, dtype=np.int32) % 20) + 2
    return StepReading(tokens=tokens, ends=list(ends), **settings)


async def test_calls_overlap_and_partial_sequences_resume_from_cached_states(worker_pool, model):
    process = make_process(worker_pool, model, batch_tokens=40)
    await process.start()
    try:
        alone = await process.read([reading(30, 4, 29)], timeout_s=60)
        growing = await process.read([reading(30, 4, is_partial=True)], timeout_s=60)
        rest = await process.read([reading(30, 4, 29, num_known=1)], timeout_s=60)
        np.testing.assert_allclose(growing[0] + rest[0], alone[0], atol=1e-5)
        await process.read([reading(30, 4, is_partial=True)], timeout_s=60)
        empty = await process.read([reading(30, 4, 4, 29, num_known=1)], timeout_s=60)
        np.testing.assert_allclose(empty, alone, atol=1e-5)
        outcomes = await asyncio.gather(
            *(process.read([reading(30, 4, 29), reading(5, 4)], timeout_s=60) for _ in range(20)),
            process.read([reading(200, 199)], timeout_s=60),
            return_exceptions=True,
        )
        *together, too_long = outcomes
        for values in together:
            np.testing.assert_allclose(values[0], alone[0], atol=1e-5)
            np.testing.assert_allclose(values[1], alone[0][:1], atol=1e-5)
        assert isinstance(too_long, ScoreError)
        assert "has 200 tokens, but the reward model reads 128" in str(too_long)
        assert process.num_lost == 0
    finally:
        await process.close()
    assert processes() == []


@pytest.mark.slow  # starts two processes
async def test_calls_lost_with_a_killed_process_are_made_again(worker_pool, model):
    process = make_process(worker_pool, model, batch_tokens=40)
    await process.start()
    try:
        expected = await process.read([reading(30, 4, 29)], timeout_s=60)
        (victim,) = processes()
        victim.suspend()  # so that the calls are in flight when it dies
        calls = [
            asyncio.create_task(process.read([reading(30, 4, 29)], timeout_s=60)) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        os.kill(victim.pid, signal.SIGKILL)
        for call in calls:
            np.testing.assert_allclose(await call, expected, atol=1e-6)
        assert process.num_lost == 1
    finally:
        await process.close()
    assert processes() == []


@pytest.mark.slow  # starts two processes
async def test_process_that_does_not_answer_is_killed_and_restarted(worker_pool, model):
    process = make_process(worker_pool, model)
    await process.start()
    try:
        (victim,) = processes()
        victim.suspend()
        with pytest.raises(ScoreError, match=r"Reward model 'steps' took longer than 0.2 s"):
            await process.read([reading(30, 29)], timeout_s=0.2)
        assert await process.read([reading(30, 29)], timeout_s=60)
        assert process.num_lost == 1
    finally:
        await process.close()


@pytest.mark.slow  # starts a process
async def test_model_that_cannot_be_loaded_is_reported_at_the_start(worker_pool, model):
    start = RewardModelSettings(model=str(model)).start_message(
        device="cuda:7", head="token", is_whole=False
    )
    process = RewardModelProcess(
        "steps", start=start, worker_pool=worker_pool, start_timeout_s=60.0
    )
    with pytest.raises(ConfigError, match="Device 'cuda:7' does not exist"):
        await process.start()
    await process.close()


def test_calls_of_a_batch_that_does_not_fit_into_memory_fail_and_the_process_goes_on(model):
    def full(module, inputs):
        if isinstance(module, torch.nn.Embedding) and inputs[0].numel() > 40:
            raise torch.OutOfMemoryError("a stand-in for a full GPU")

    settings = RewardModelSettings(model=str(model), template="ids", batch_tokens=60)
    start = settings.checked(scorer="steps").start_message(
        device="cpu", head="token", is_whole=False, kept_tokens=0
    )
    link = FakeLink()
    hook = register_module_forward_pre_hook(full)
    with run_beside(link, "steps-0", StartRewardModel, RewardModelWorker):
        try:
            link.call(start).result()
            large = link.call(
                ReadSteps(readings=[reading(30, 29), reading(30, 3, 29), reading(5, 4)])
            )
            with pytest.raises(ScoreError, match=r"2 sequences of up to 30 .* \(now 60\)"):
                large.result()
            ((value,),) = link.call(ReadSteps(readings=[reading(30, 29)])).result().values
            assert np.isfinite(value)
        finally:
            hook.remove()
            link.call(Stop())
