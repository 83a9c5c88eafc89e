import queue
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from batches import batch_of, random_rollout
from critics import critic_batch
from tiny_model import ALPHABET, make_tiny_model
from transformers import AutoTokenizer

from millrace.cluster.hub import Hub
from millrace.cluster.link import WorkerCall, serve
from millrace.cluster.messages import (
    Copied,
    Done,
    Generate,
    Message,
    Published,
    Release,
    SaveCheckpoint,
    Saved,
    StartTrainer,
    Stepped,
    Stop,
    TrainStep,
    WorkerProgress,
)
from millrace.config import load_config
from millrace.core.microbatch import Batch
from millrace.core.records import DEFAULT_POLICY, Request, Sampling, WeightUpdate
from millrace.training.build import build_trainer
from millrace.training.checkpoints.directory import damage_to, read_run_state
from millrace.training.checkpoints.snapshot import CheckpointWriter
from millrace.training.worker import TrainerWorker
from millrace.weights.backends import PackingSender
from millrace.weights.transport import make_receiver

TIMEOUT_S = 30.0


class InProcessLink:
    """A link whose other end is the test."""

    def __init__(self) -> None:
        self._calls: queue.Queue[WorkerCall] = queue.Queue()
        self._replies: queue.Queue[Message] = queue.Queue()
        self.events: queue.Queue[Message] = queue.Queue()

    def receive(self, timeout_s: float | None = None) -> WorkerCall | None:
        try:
            return self._calls.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def emit(self, message: Message) -> None:
        self.events.put(message)

    def _send(self, id: bytes, message: Message) -> None:
        self._replies.put(message)

    def send(self, message: Message) -> None:
        self._calls.put(WorkerCall(message, link=self, id=b"1"))

    def reply(self) -> Message:
        """The next one, to whatever call."""
        return self._replies.get(timeout=TIMEOUT_S)

    def call(self, message: Message) -> Message:
        self.send(message)
        return self.reply()

    def event(self, kind: type[Message]) -> Message:
        while not isinstance(event := self.events.get(timeout=TIMEOUT_S), kind):
            pass
        return event


@pytest.fixture
def link():
    link = InProcessLink()
    main = partial(serve, link, "trainer", message=StartTrainer, start=TrainerWorker)
    thread = threading.Thread(target=main)
    thread.start()
    yield link
    if thread.is_alive():
        assert link.call(Stop()) == Done()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.fixture
def config(tmp_path: Path) -> dict:
    return load_config(
        {
            "model": str(make_tiny_model(tmp_path / "model")),
            "run_dir": str(tmp_path / "run"),
            "cluster": {"threads": 1},
            "optimizer": {"learning_rate": 1e-3},
            "placement": {"trainer": "cpu"},
            "checkpoint": {"keep": 2},
        }
    ).model_dump(mode="json")


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    vocab = len(ALPHABET)
    return batch_of([random_rollout(rng, sampled=n, vocab=vocab) for n in (3, 9, 5, 5)])


def poisoned_batch() -> Batch:
    poisoned = batch()
    poisoned.microbatches[0].advantages[:] = np.nan
    return poisoned


def save(link: InProcessLink, directory: Path, *, version: int, run_state: dict | None = None):
    message = SaveCheckpoint(directory=str(directory), run_state=run_state or {})
    assert link.call(message) == Copied()
    assert link.reply() == Saved(version=version)


def staged(update) -> dict[str, torch.Tensor]:
    receiver = make_receiver("shm")
    tensors = {name: tensor.clone() for name, tensor in receiver.stage(update).items()}
    receiver.close()
    return tensors


@pytest.mark.parametrize("share_gpu", ["auto", "sleep"])
def test_each_step_is_answered_and_its_weights_published(link, config, share_gpu):
    config["cluster"]["share_gpu"] = share_gpu
    assert link.call(StartTrainer(config=config, checkpoint=None)) == Done()
    expected = build_trainer(load_config(config), path=config["model"]["path"])
    for version in (1, 2):
        reply = link.call(TrainStep(batch=batch(version), version=version))
        metrics = expected.step(batch(version))
        assert reply == Stepped(version=version, metrics=metrics)
        update = link.event(Published).update
        assert update.version == version
        weights = staged(update)
        assert weights.keys() == expected.policy.weights().keys()
        for name, weight in expected.policy.weights().items():
            assert torch.equal(weights[name], weight), name
        assert link.call(Release(version=version)) == Done()


class SlowReadingSender:
    """Reads the weights long after it was asked to publish them."""

    def __init__(self, sender: PackingSender) -> None:
        self._sender = sender
        self.dtype, self.has_room = sender.dtype, True

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
        time.sleep(0.2)
        return self._sender.publish(version, tensors)

    def release(self, version: int) -> None:
        self._sender.release(version)

    def close(self) -> None:
        self._sender.close()


class ObservedWorker(TrainerWorker):
    """Sees the memory of the trainer after each step, and publishes slowly."""

    has_gradients: ClassVar[list[bool]] = []

    def _publish(self) -> None:
        module = self._trainers[DEFAULT_POLICY].policy.module
        self.has_gradients.append(any(p.grad is not None for p in module.parameters()))
        for publisher in self._publishers.values():
            if not isinstance(publisher.sender, SlowReadingSender):
                publisher.sender = SlowReadingSender(publisher.sender)
        super()._publish()


def test_trainer_whose_engines_sleep_keeps_no_gradients_and_no_copy_of_its_weights(config):
    """Versions are whole although each step begins before the one before it was read."""
    link, ObservedWorker.has_gradients[:] = InProcessLink(), []
    config["cluster"]["share_gpu"] = "sleep"
    serving = partial(serve, message=StartTrainer, start=ObservedWorker)
    thread = threading.Thread(target=serving, args=(link, "trainer"))
    thread.start()
    assert link.call(StartTrainer(config=config, checkpoint=None)) == Done()
    expected = build_trainer(load_config(config), path=config["model"]["path"])
    for version in (1, 2, 3):
        link.send(TrainStep(batch=batch(version), version=version))
    for version in (1, 2, 3):
        metrics = expected.step(batch(version))
        assert link.reply() == Stepped(version=version, metrics=metrics)
        weights = staged(link.event(Published).update)
        for name, weight in expected.policy.weights().items():
            assert torch.equal(weights[name], weight), (version, name)
    assert ObservedWorker.has_gradients == [False] * 3
    assert link.call(Stop()) == Done()
    thread.join(TIMEOUT_S)


def test_with_lora_only_the_adapter_is_published(link, config):
    config = {**config, "engine": {"dtype": "bfloat16"}, "lora": {"rank": 2}}
    assert link.call(StartTrainer(config=config, checkpoint=None)) == Done()
    link.call(TrainStep(batch=batch(), version=1))
    update = link.event(Published).update
    weights = staged(update)
    assert len(weights) == 2 * 2 * 7  # factors, layers, projections
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in weights)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}  # as the engine has it
    own = 2 * sum(weight.numel() for weight in weights.values())
    assert own <= update.num_bytes <= own + 64 * len(weights)
    link.call(Release(version=1))


def test_an_earlier_version_on_disk_leaves_the_same_version_of_its_policy_alone(link, config):
    policies = {"solver": {"lags": [1]}}
    config = {**config, "lora": {"rank": 2}, "policies": policies, "weights": {"transport": "disk"}}
    assert link.call(StartTrainer(config=config, checkpoint=None)) == Done()
    for version in (1, 2):
        assert isinstance(link.call(TrainStep(batch=batch(), version=version)), Stepped)
    updates = [link.event(Published).update for _ in range(3)]
    found = {(update.policy, update.version): update.location for update in updates}
    assert found.keys() == {(DEFAULT_POLICY, 1), (DEFAULT_POLICY, 2), ("solver@1", 1)}
    assert len({*found.values()}) == 3
    assert all(Path(location).is_file() for location in found.values())


def test_a_critic_is_saved_and_restored_but_never_published(link, config, tmp_path):
    config = load_config(config, overrides={"critic": {"learning_rate": 1e-2}}).model_dump()
    rng = np.random.default_rng(0)
    rollouts = [random_rollout(rng, sampled=n, vocab=len(ALPHABET)) for n in (3, 9, 5, 5)]
    step = critic_batch(rollouts)
    assert link.call(StartTrainer(config=config, checkpoint=None)) == Done()
    first = link.call(TrainStep(batch=step, version=1))
    assert {"critic/loss", "critic/explained_variance"} <= first.metrics.keys()
    assert first.metrics["critic/value_mean"] == 0  # as it is before it has learned anything
    weights = staged(link.event(Published).update)
    policy = build_trainer(load_config(config), path=config["model"]["path"])
    assert weights.keys() == policy.policy.weights().keys()
    folder = tmp_path / "run" / "checkpoints" / "step_1"
    save(link, folder, version=1)
    link.call(Release(version=1))
    second = link.call(TrainStep(batch=step, version=2))
    resumed = build_trainer(load_config(config), path=str(folder))
    resumed.restore(folder)
    assert second == Stepped(version=2, metrics=resumed.step(step))


def test_progress_reports_spans_and_counters(link, config):
    link.call(StartTrainer(config=config, checkpoint=None))
    reply = link.call(TrainStep(batch=batch(), version=1))
    spans = []
    while not {"load", "step", "publish", "a batch"} <= {span.name for span in spans}:
        progress = link.event(WorkerProgress)
        spans += progress.spans
    assert progress.counters["steps"] == 1
    assert progress.counters["trained_tokens"] == reply.metrics["batch/trained_tokens"] == 22
    assert {span.worker for span in spans} == {"trainer"}
    busy = {span.name: span.busy for span in spans}
    assert busy["step"]
    assert busy["publish"]
    assert not busy["a batch"]


def test_a_checkpoint_holds_model_tokenizer_and_both_states(link, config, tmp_path):
    link.call(StartTrainer(config=config, checkpoint=None))
    folder = tmp_path / "run" / "checkpoints"
    for version in (1, 2, 3):
        link.call(TrainStep(batch=batch(version), version=version))
        link.call(Release(version=link.event(Published).update.version))
        save(link, folder / f"step_{version}", version=version, run_state={"cursor": 7})
    assert {path.name for path in folder.iterdir()} == {"step_2", "step_3"}  # checkpoint.keep = 2
    assert read_run_state(folder / "step_3") == {"step": 3, "version": 3, "cursor": 7}
    tokenizer = AutoTokenizer.from_pretrained(folder / "step_3")
    assert tokenizer.decode(tokenizer.encode("1+2=3")) == "1+2=3"


class GatedWriter(CheckpointWriter):
    """Writes only when the gate is open."""

    gate: ClassVar[threading.Event]
    began: ClassVar[threading.Event]

    def begin(self, directory, *, write, **rest):
        def write_late(folder: Path) -> None:
            self.began.set()
            assert self.gate.wait(TIMEOUT_S)
            write(folder)

        super().begin(directory, write=write_late, **rest)


@pytest.fixture
def gated() -> Iterator[InProcessLink]:
    """A trainer whose checkpoints wait for GatedWriter.gate."""
    GatedWriter.gate, GatedWriter.began = threading.Event(), threading.Event()
    link = InProcessLink()

    def run() -> None:
        load = partial(TrainerWorker, make_writer=GatedWriter)
        serve(link, "trainer", message=StartTrainer, start=load)

    thread = threading.Thread(target=run)
    thread.start()
    yield link
    GatedWriter.gate.set()
    link.send(Stop())
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_steps_continue_while_a_checkpoint_is_written_and_do_not_change_it(
    gated, config, tmp_path, kind
):
    if kind == "lora":
        config = load_config({**config, "lora": {"rank": 2}}).model_dump(mode="json")
    assert gated.call(StartTrainer(config=config, checkpoint=None)) == Done()
    assert isinstance(gated.call(TrainStep(batch=batch(1), version=1)), Stepped)
    first = tmp_path / "run" / "checkpoints" / "step_1"
    assert gated.call(SaveCheckpoint(directory=str(first), run_state={})) == Copied()
    assert GatedWriter.began.wait(TIMEOUT_S)
    later = []
    for version in (2, 3):  # each is answered, and the checkpoint is not
        later.append(gated.call(TrainStep(batch=batch(version), version=version)))
        assert isinstance(later[-1], Stepped)
    assert not first.exists()
    # The next checkpoint waits for this one: there is one copy at a time.
    second = SaveCheckpoint(directory=str(first.with_name("step_3")), run_state={})
    gated.send(second)
    GatedWriter.gate.set()
    assert gated.reply() == Saved(version=1)
    assert gated.reply() == Copied()
    assert gated.reply() == Saved(version=3)
    path = config["model"]["path"] if kind == "lora" else str(first)
    resumed = build_trainer(load_config(config), path=path)
    resumed.restore(first)
    assert [resumed.step(batch(version)) for version in (2, 3)] == [r.metrics for r in later]


def test_a_stopped_trainer_finishes_its_checkpoint(gated, config, tmp_path):
    gated.call(StartTrainer(config=config, checkpoint=None))
    directory = tmp_path / "run" / "checkpoints" / "step_0"
    assert gated.call(SaveCheckpoint(directory=str(directory), run_state={})) == Copied()
    assert gated.call(Stop()) == Done()
    assert not directory.exists()
    GatedWriter.gate.set()
    assert gated.reply() == Saved(version=0)
    assert damage_to(directory) is None


def test_a_trainer_started_from_a_checkpoint_continues_at_its_step(link, config, tmp_path):
    trainer = build_trainer(load_config(config), path=config["model"]["path"])
    trainer.step(batch(1))
    make_tiny_model(tmp_path / "step_1", seed=99)  # its tokenizer; the model is overwritten
    trainer.snapshot().write(tmp_path / "step_1")
    metrics = trainer.step(batch(2))
    assert link.call(StartTrainer(config=config, checkpoint=str(tmp_path / "step_1"))) == Done()
    assert link.call(TrainStep(batch=batch(2), version=2)) == Stepped(version=2, metrics=metrics)


def test_a_failed_call_is_answered_and_the_trainer_continues(link, config, tmp_path):
    link.call(StartTrainer(config=config, checkpoint=None))
    (tmp_path / "in the way").write_text("")
    directory = str(tmp_path / "in the way" / "step_0")
    assert link.call(SaveCheckpoint(directory=directory, run_state={})) == Copied()
    reply = link.reply()
    assert reply.kind == "CheckpointError"
    request = Request(id="0", prompt=np.zeros(1, np.int32), sampling=Sampling())
    assert "does not take Generate" in link.call(Generate(request=request)).reason
    assert link.call(TrainStep(batch=batch(), version=1)).version == 1


def test_a_skipped_step_publishes_a_version_with_unchanged_weights(link, config):
    link.call(StartTrainer(config=config, checkpoint=None))
    expected = build_trainer(load_config(config), path=config["model"]["path"]).policy.weights()
    reply = link.call(TrainStep(batch=poisoned_batch(), version=1))
    assert (reply.version, reply.skipped, reply.metrics["skipped/updates"]) == (1, (0,), 1)
    update = link.event(Published).update
    assert update.version == 1
    for name, weight in staged(update).items():
        assert torch.equal(weight, expected[name]), name
    link.call(Release(version=1))
    reply = link.call(TrainStep(batch=batch(), version=2, more=(poisoned_batch(),)))
    assert (reply.version, reply.skipped) == (2, (1,))


def test_a_missing_model_is_reported_in_one_sentence(link, config):
    wrong = {**config, "model": {"path": "/nowhere/model"}}
    reply = link.call(StartTrainer(config=wrong, checkpoint=None))
    assert reply.kind == "ConfigError"
    assert reply.reason == "Model '/nowhere/model' does not exist; check model.path."


@pytest.mark.slow  # every run has one
async def test_a_real_trainer_process_steps_publishes_and_stops(config, tmp_path):
    events = []
    async with Hub(log_dir=tmp_path, on_event=lambda _, event: events.append(event)) as hub:
        worker = await hub.launch("trainer", "millrace.training.worker")
        await worker.call(StartTrainer(config=config, checkpoint=None))
        stepped = await worker.call(TrainStep(batch=batch(), version=1))
        assert isinstance(stepped, Stepped)
        await worker.call(TrainStep(batch=batch(1), version=2))
        await worker.stop()
    assert 1 in [event.update.version for event in events if isinstance(event, Published)]
    assert (tmp_path / "trainer.log").read_text() == ""
