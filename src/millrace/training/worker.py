"""A trainer rank's process: steps on the batches it is sent and publishes the weights of each step.

Threads: the main thread takes calls, steps and copies the state of a checkpoint; the link, the
publisher and the writing of a checkpoint have threads of their own. A step is answered before its
weights are published, so that the controller packs and sends the next batch meanwhile.
"""

import time
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from millrace.cluster import messages
from millrace.cluster.link import Link, WorkerCall, run_worker, serve
from millrace.config import RunConfig
from millrace.core import files as storage
from millrace.core.errors import CheckpointError, RankUnreachable, RunFailed
from millrace.core.records import WeightUpdate
from millrace.core.spans import Timeline
from millrace.models.directory import load_tokenizer, text_config
from millrace.models.loading import resolve_device, resolve_dtype, use_threads
from millrace.training.build import build_sender, build_trainer, seed_everything
from millrace.training.checkpoints.snapshot import CheckpointWriter
from millrace.training.parallel.ranks import Ranks, is_lost_connection, use_interface_to
from millrace.weights.probe import ProbeReference
from millrace.weights.publisher import Publisher

PROGRESS_S = 0.25
MERGED = "merged"  # subfolder of a checkpoint


def main(link: Link, name: str) -> None:
    serve(link, name, message=messages.StartTrainer, start=TrainerWorker)


class TrainerWorker:
    def __init__(
        self,
        message: messages.StartTrainer,
        link: Link,
        timeline: Timeline,
        make_writer: type[CheckpointWriter] = CheckpointWriter,
    ) -> None:
        config = RunConfig.model_validate(message.config)
        devices = [config.placement.rank(i) for i in range(config.trainer.num_ranks)]
        config = config.trained_on(devices[message.rank])
        use_threads(config.cluster.threads)
        device = resolve_device(config.placement.trainer[0])
        if device.index is not None:
            torch.cuda.set_device(device)
        # The checkpoint of an adapter holds no model, so the base model comes from the config.
        path = config.model.path if config.lora else message.checkpoint or config.model.path
        seed_everything(config.seed)
        # Before the model is loaded: each rank loads its shard.
        self._ranks = _join_ranks(message, config, devices=devices, device=device)
        if not self._ranks.is_alone:
            found = text_config(path, trust_remote_code=config.model.trust_remote_code)
            model = sha256(found.to_json_string().encode()).hexdigest()[:12]
            packages = {name: version(name) for name in ("millrace", "torch", "transformers")}
            self._ranks.check_equal({**packages, "model config": model})
        self._trainer = build_trainer(
            config, path=path, ranks=self._ranks, on_forward=self._on_forward
        )
        if message.checkpoint is not None:
            self._trainer.restore(Path(message.checkpoint))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            path, trust_remote_code=config.model.trust_remote_code
        )
        self._writing_ranks = self._ranks.for_thread()
        self._writer = make_writer(keep=config.checkpoint.keep, ranks=self._writing_ranks)
        exports = config.lora is not None and config.lora.export_merged
        self._has_adapter = config.lora is not None
        self._export_version = config.trainer.steps if exports else None
        # Engines that wake up need what the trainer holds for its next step.
        self._gives_memory_back = device.type == "cuda" and config.cluster.share_gpu == "sleep"
        self._trained_tokens = 0.0
        self._num_forwards = 0
        self._is_stepping = False
        self._link = link
        self._timeline = timeline
        self._reported_at = time.monotonic()
        self._publisher = Publisher(
            build_sender(
                config,
                ranks=self._ranks,
                reference=self._reference(config, device),
                own_address=message.own_address,
            ),
            emit=self._announce,
            patience_s=config.weights.timeout_s,
        )

    def _reference(self, config: RunConfig, device: torch.device) -> ProbeReference | None:
        if not config.probes_weights or self._ranks.rank != 0:
            return None
        # Adapters travel in float32, whatever engines compute in.
        dtype = str(resolve_dtype(config.engine.dtype, device)) if config.lora else ""
        module, name = self._trainer.policy.module, dtype.removeprefix("torch.")
        return ProbeReference(module, lora=config.lora, dtype=name)

    def serve(self) -> None:
        """Answer calls until Stop. Raises errors of the publisher's thread."""
        try:
            while True:
                self._timeline.enter("a batch", busy=False)
                call = self._link.receive(PROGRESS_S)
                self._publisher.check()
                if call is not None and not self._handle(call):
                    return
                if time.monotonic() - self._reported_at >= PROGRESS_S:
                    self._report_progress()
        finally:
            self._writer.wait()
            self._publisher.close()

    def _handle(self, call: WorkerCall) -> bool:
        """Answer one call; False = stop."""
        message = call.message
        if isinstance(message, messages.Lend):
            self._lend(call)
            return True
        reply: messages.Message = messages.Done()
        try:
            match message:
                case messages.TrainStep():
                    reply = self._step(message)
                case messages.SaveCheckpoint():
                    self._save(call, message)  # the writer's thread replies
                    return True
                case messages.Release():
                    self._publisher.release(message.version)
                case messages.Stop():
                    pass
                case _:
                    raise TypeError(f"a running trainer does not take {type(message).__name__}")
        except Exception as error:  # noqa: BLE001 - the controller raises it again
            if is_lost_connection(error):
                reason = str(error).split(". ")[0]
                error = RankUnreachable(f"lost its connection to another rank ({reason})")
            call.fail(error)
            return True
        if isinstance(message, messages.TrainStep):
            self._timeline.enter("publish", busy=True)  # before the reply: the step is over
        call.reply(reply)
        if isinstance(message, messages.TrainStep) and message.publish:
            self._publisher.publish(self._trainer.steps_done, self._trainer.policy.weights())
            self._report_progress()
        return not isinstance(message, messages.Stop)

    def _lend(self, call: WorkerCall) -> None:
        """Rank 0 replies when the weights can be read. The others offer it their shards, which it
        does not gather if its version is still readable; the next version then replaces them."""
        version, weights = self._trainer.steps_done, self._trainer.policy.weights()
        if self._ranks.rank == 0:
            self._publisher.lend(
                version,
                weights,
                answer=lambda update: call.reply(messages.Published(update=update)),
            )
        else:
            self._publisher.publish(version, weights)
            call.reply(messages.Done())

    def _announce(self, update: WeightUpdate) -> None:
        """In the publisher's thread."""
        if self._ranks.rank == 0:
            self._link.emit(messages.Published(update=update))
        else:
            self._publisher.release(update.version)  # rank 0 holds its bytes

    def _step(self, message: messages.TrainStep) -> messages.Stepped:
        made = message.version if message.updates else message.version + 1
        assert made == self._trainer.steps_done + 1, "a step makes the next version"
        self._timeline.enter("step" if message.updates else "evaluate", busy=True)
        self._is_stepping = True
        if message.max_rows is not None:
            self._trainer.limit_rows(message.max_rows)
        if message.updates:
            metrics = self._trainer.step(message.batch, *message.more)
        else:
            metrics = {"loss": self._trainer.held_out_loss(message.batch)}
        self._is_stepping = False
        if not message.updates:
            return messages.Stepped(version=message.version, metrics=metrics)
        if self._gives_memory_back:
            torch.cuda.empty_cache()
        self._trained_tokens += metrics["batch/trained_tokens"]
        skipped, reported = self._trainer.skipped, self._trainer.reported
        return messages.Stepped(
            version=message.version, metrics=metrics, skipped=skipped, reported=reported
        )

    def _save(self, call: WorkerCall, message: messages.SaveCheckpoint) -> None:
        """Copy the state. A thread writes it and replies while steps continue."""
        self._timeline.enter("checkpoint", busy=True)
        self._writer.wait()  # before the copy: the host holds one snapshot at a time
        directory, version = Path(message.directory), self._trainer.steps_done
        is_exported = version == self._export_version
        try:
            snapshot = self._trainer.snapshot(merged_into=MERGED if is_exported else None)
        except (MemoryError, RuntimeError) as error:
            if is_lost_connection(error):
                raise
            # Other ranks may be in the middle of a collective: only one rank alone can go on.
            kind = CheckpointError if self._ranks.is_alone else RunFailed
            raise kind(
                f"Checkpoint {str(directory)!r} could not be made: the trainer's state could not be"
                f" copied to the host ({storage.reason(error)}); it needs"
                f" {self._trainer.state_bytes()} bytes of memory there."
            ) from error
        call.send_part(messages.Copied())
        # While a sharded model is written, its parts are on the disk as well.
        is_sharded = not self._ranks.is_alone and (is_exported or not self._has_adapter)
        num_models = is_exported + is_sharded

        def write(folder: Path) -> None:
            snapshot.write(folder, self._writing_ranks)
            if self._ranks.rank == 0:
                self._tokenizer.save_pretrained(folder)
                if is_exported:
                    self._tokenizer.save_pretrained(folder / MERGED)

        def reply(error: BaseException | None, complaint: str | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                call.reply(messages.Saved(version=version, complaint=complaint))

        self._writer.begin(
            directory,
            write=write,
            run_state={"step": version, "version": version, **message.run_state},
            needed_bytes=self._trainer.state_bytes()
            + num_models * self._trainer.policy.merged_bytes(),
            on_done=reply,
        )

    def _report_progress(self) -> None:
        steps_done = float(self._trainer.steps_done)
        progress = messages.WorkerProgress(
            spans=self._timeline.drain(),
            counters={"steps": steps_done, "trained_tokens": self._trained_tokens},
            work=self._num_forwards,
            waits=not self._is_stepping,
        )
        self._link.emit(progress)
        self._reported_at = time.monotonic()

    def _on_forward(self) -> None:
        """Count a forward pass that begins, as a sign of progress."""
        self._num_forwards += 1
        if time.monotonic() - self._reported_at >= PROGRESS_S:
            self._report_progress()


def _join_ranks(
    message: messages.StartTrainer,
    config: RunConfig,
    *,
    devices: Sequence[str],
    device: torch.device,
) -> Ranks:
    shares_gpu = message.shares_gpu
    if shares_gpu is None:
        shares_gpu = len(set(devices)) < len(devices)
    if message.peer_address:
        use_interface_to(message.peer_address)
    return Ranks.join(
        config.trainer.mesh_sizes,
        rank=message.rank,
        rendezvous=message.rendezvous,
        device=device,
        backend="gloo" if shares_gpu else None,  # NCCL shares no GPU
        timeout_s=config.supervision.stall_timeout_s,  # a hung rank is found before that
    )


if __name__ == "__main__":
    run_worker(main)
