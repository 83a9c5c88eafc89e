"""Trainer process: steps on the batches it is sent, and publishes the weights of each step.

Threads: the main thread takes calls, steps and copies what a checkpoint will hold; the link, the
publisher and the writing of a checkpoint have threads of their own. A step is answered before its
weights are published: the controller packs and sends the next batch meanwhile.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millrace.cluster.link import Link, WorkerCall, run_worker
from millrace.cluster.messages import (
    Copied,
    Done,
    Lend,
    Lent,
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
from millrace.config import CriticConfig, RunConfig, TrainerConfig
from millrace.core import files as storage
from millrace.core.errors import CheckpointError
from millrace.core.spans import Timeline
from millrace.models.attention.packed import PACKED_ATTENTION
from millrace.models.directory import load_tokenizer
from millrace.models.loading import load_model, resolve_device
from millrace.models.lora.trained import TrainedAdapter
from millrace.models.moe.router_search import check_replay, find_routing
from millrace.models.moe.routing import RouteReplay
from millrace.training.checkpoints.snapshot import TrainerSnapshot
from millrace.training.checkpoints.writer import CheckpointResult, CheckpointWriter
from millrace.training.critic import Critic, Estimation
from millrace.training.losses.recipes import build_loss
from millrace.training.optimizer import Schedule
from millrace.training.settings import TrainSettings
from millrace.training.trainer import Trainer
from millrace.weights.publisher import Publisher, Sender
from millrace.weights.sender import make_sender, resolve_address, resolve_transport

PROGRESS_S = 0.25
MERGED = "merged"  # folder of a checkpoint


def main(link: Link, name: str) -> None:
    timeline = Timeline(name)
    worker = start(link, timeline)
    if worker is None:
        return
    try:
        worker.run()
    finally:
        worker.close()


def start(
    link: Link, timeline: Timeline, *, make_writer: type[CheckpointWriter] = CheckpointWriter
) -> "TrainerWorker | None":
    """Wait for StartTrainer and load everything; None = stopped before that."""
    while True:
        call = link.receive()
        assert call is not None
        match call.message:
            case StartTrainer() as message:
                try:
                    worker = TrainerWorker(
                        message, link=link, timeline=timeline, make_writer=make_writer
                    )
                except Exception as error:  # noqa: BLE001 - the controller raises it again
                    call.fail(error)
                else:
                    call.reply()
                    return worker
            case Stop():
                call.reply()
                return None
            case message:
                name = type(message).__name__
                call.fail(TypeError(f"a trainer starts with StartTrainer, not {name}"))


class TrainerWorker:
    """A loaded trainer and what it talks to."""

    def __init__(
        self,
        message: StartTrainer,
        *,
        link: Link,
        timeline: Timeline,
        make_writer: type[CheckpointWriter] = CheckpointWriter,
    ) -> None:
        config = RunConfig.model_validate(message.config)
        if config.trainer.threads is not None:
            torch.set_num_threads(config.trainer.threads)
        seed_everything(config.seed)
        # The checkpoint of an adapter is no model: that is still the one of the config.
        path = config.model.path if config.lora else message.checkpoint or config.model.path
        self._trainer = build_trainer(config, path=path, on_pass=self._on_pass)
        if message.checkpoint is not None:
            self._trainer.restore(Path(message.checkpoint))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            path, trust_remote_code=config.model.trust_remote_code
        )
        self._writer = make_writer(keep=config.checkpoint.keep)
        exports = config.lora is not None and config.lora.export_merged
        self._export_at = config.trainer.steps if exports else None  # version
        self._trained_tokens = 0.0
        self._num_passes = 0
        self._is_stepping = False
        self._link = link
        self._timeline = timeline
        self._told_at = time.monotonic()
        self._publisher = Publisher(
            build_sender(config),
            emit=lambda update: link.emit(Published(update=update)),
            patience_s=config.weights.timeout_s,
        )

    def run(self) -> None:
        """Answer calls until Stop. Raises what the publisher's thread raised."""
        while True:
            self._timeline.enter("a batch", busy=False)
            call = self._link.receive(PROGRESS_S)
            self._publisher.check()
            if call is not None and not self._handle(call):
                return
            if time.monotonic() - self._told_at >= PROGRESS_S:
                self._tell_progress()

    def close(self) -> None:
        self._writer.wait()
        self._publisher.close()

    def _handle(self, call: WorkerCall) -> bool:
        """Answer one call; False = stop."""
        if isinstance(call.message, Lend):
            self._lend(call)
            return True
        try:
            if isinstance(call.message, SaveCheckpoint):
                self._save(call, call.message)  # whose thread replies
                return True
            reply = self._answer(call.message)
        except Exception as error:  # noqa: BLE001 - the controller raises it again
            call.fail(error)
            return True
        if isinstance(call.message, TrainStep):
            self._timeline.enter("publish", busy=True)  # the step is over before it is answered
        call.reply(reply)
        if isinstance(call.message, TrainStep) and call.message.publish:
            self._publish()
        return not isinstance(call.message, Stop)

    def _answer(self, message: Message) -> Message:
        match message:
            case TrainStep():
                return self._step(message)
            case Release():
                self._publisher.release(message.version)
            case Stop():
                pass
            case _:
                raise TypeError(f"a running trainer does not know {type(message).__name__}")
        return Done()

    def _step(self, message: TrainStep) -> Stepped:
        assert message.version == self._trainer.steps_done + 1, "a step makes the next version"
        self._timeline.enter("step", busy=True)
        self._is_stepping = True
        metrics = self._trainer.step(message.batch, *message.more)
        self._is_stepping = False
        self._trained_tokens += metrics["batch/trained_tokens"]
        return Stepped(version=message.version, metrics=metrics, skipped=self._trainer.skipped)

    def _publish(self) -> None:
        self._publisher.publish(self._trainer.steps_done, self._trainer.named_weights())
        self._tell_progress()

    def _lend(self, call: WorkerCall) -> None:
        """Answered when the weights lie ready."""
        self._publisher.lend(
            self._trainer.steps_done,
            self._trainer.named_weights(),
            answer=lambda update: call.reply(Lent(update=update)),
        )

    def _save(self, call: WorkerCall, message: SaveCheckpoint) -> None:
        """Copy the state; it is written, and the call answered, while steps go on."""
        self._timeline.enter("checkpoint", busy=True)
        self._writer.wait()  # before the copy: the host has room for one
        directory, version = Path(message.directory), self._trainer.steps_done
        is_exported = version == self._export_at
        try:
            snapshot = self._trainer.snapshot(merged_into=MERGED if is_exported else None)
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"Checkpoint {str(directory)!r} could not be made: the trainer's state could not be"
                f" copied to the host ({storage.reason(error)}); it needs"
                f" {self._trainer.state_bytes()} bytes of memory there."
            ) from error
        needed_bytes = self._trainer.state_bytes()
        call.tell(Copied())
        self._writer.begin(
            directory,
            write=lambda folder: self._write(snapshot, folder, exported=is_exported),
            run_state={"step": version, "version": version, **message.run_state},
            needed_bytes=needed_bytes + (self._trainer.merged_bytes() if is_exported else 0),
            tell=lambda ending: _answer_saved(call, version, ending),
        )

    def _write(self, snapshot: TrainerSnapshot, folder: Path, *, exported: bool) -> None:
        snapshot.write(folder)
        self._tokenizer.save_pretrained(folder)
        if exported:
            self._tokenizer.save_pretrained(folder / MERGED)

    def _tell_progress(self) -> None:
        counters = {
            "steps": float(self._trainer.steps_done),
            "trained_tokens": self._trained_tokens,
        }
        progress = WorkerProgress(
            spans=self._timeline.drain(),
            counters=counters,
            work=self._num_passes,
            waits=not self._is_stepping,
        )
        self._link.emit(progress)
        self._told_at = time.monotonic()

    def _on_pass(self) -> None:
        """The trainer begins a forward pass."""
        self._num_passes += 1
        if time.monotonic() - self._told_at >= PROGRESS_S:
            self._tell_progress()


def _answer_saved(call: WorkerCall, version: int, ending: CheckpointResult) -> None:
    if ending.error is not None:
        call.fail(ending.error)
    else:
        call.reply(Saved(version=version, complaint=ending.complaint))


def build_trainer(
    config: RunConfig, *, path: str, on_pass: Callable[[], None] = lambda: None
) -> Trainer:
    """The trainer the config describes, with the weights at `path`."""
    settings = config.trainer
    model = load_to_train(config, path=path)
    adapter = None
    if config.lora is not None:
        adapter = TrainedAdapter(model, config.lora, model_path=path)
    return Trainer(
        model,
        adapter=adapter,
        critic=None
        if config.critic is None
        else build_critic(config, config.critic, on_pass=on_pass),
        replay=replay_of(model) if settings.replay_routes else None,
        loss=build_loss(config.loss, max_new_tokens=config.sampling.max_new_tokens),
        schedule=Schedule(
            learning_rate=settings.learning_rate,
            kind=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
            min_share=settings.min_learning_rate_share,
        ),
        technique=technique_of(settings),
        logprob_chunk=settings.logprob_chunk,
        epochs=settings.epochs,
        on_pass=on_pass,
    )


def replay_of(model: PreTrainedModel) -> RouteReplay | None:
    """None of a dense model; raises ConfigError if the routers of the model are not to be told."""
    routing = find_routing(model)
    if routing is None:
        return None
    check_replay(model, routing)
    return RouteReplay(routing)


def build_critic(
    config: RunConfig, settings: CriticConfig, *, on_pass: Callable[[], None]
) -> Critic:
    """The critic the config describes, as it is before it has learned anything."""
    return Critic(
        load_to_train(config, path=settings.path or config.model.path),
        estimation=Estimation(
            discount=settings.discount, decay=settings.decay, normalize=settings.normalize
        ),
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        value_clip=settings.value_clip,
        loss_weight=settings.loss_weight,
        technique=technique_of(config.trainer),
        on_pass=on_pass,
    )


def load_to_train(config: RunConfig, *, path: str) -> PreTrainedModel:
    return load_model(
        path,
        dtype=torch.float32,
        device=resolve_device(config.trainer.device),
        attention=PACKED_ATTENTION,
        trust_remote_code=config.model.trust_remote_code,
    )


def technique_of(settings: TrainerConfig) -> TrainSettings:
    return TrainSettings(
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        compute_dtype=getattr(torch, settings.dtype),
        gradient_checkpointing=settings.gradient_checkpointing,
        compile_layers=settings.compile,
    )


def build_sender(config: RunConfig) -> Sender:
    """The trainer's end of the transport."""
    weights, engine = config.weights, config.engine
    device = resolve_device(config.trainer.device)
    is_one_host = engine.remote == 0
    transport = resolve_transport(
        weights.transport, device=device, engine_device=engine.device, is_one_host=is_one_host
    )
    return make_sender(
        transport,
        dtype=getattr(torch, config.travel_dtype),
        payload=weights.payload,
        directory=Path(weights.directory or Path(config.run_dir) / "weights"),
        address=resolve_address(
            weights.address,
            is_one_host=is_one_host,
            cluster_address=config.cluster.advertise or config.cluster.address,
        ),
        num_engines=engine.count + engine.remote,
        bucket_bytes=weights.bucket_bytes,
        timeout_s=weights.timeout_s,
        device=device if engine.device != "cpu" else None,
    )


def seed_everything(seed: int) -> None:
    """For losses that draw random numbers; the built-in ones do not."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


if __name__ == "__main__":
    run_worker(main)
