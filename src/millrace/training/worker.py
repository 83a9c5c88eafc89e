"""A trainer rank's process: steps on the batches it is sent and publishes the weights of each step.

Threads: the main thread takes calls, steps and copies the state of a checkpoint; the link, the
publisher and the writing of a checkpoint have threads of their own. A step is answered before its
weights are published, so that the controller packs and sends the next batch meanwhile.
"""

import time
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from millrace.cluster import messages
from millrace.cluster.link import Link, WorkerCall, run_module
from millrace.config import RunConfig
from millrace.core import files as storage
from millrace.core.errors import CheckpointError, RankUnreachable, RunFailed
from millrace.core.microbatch import Batch
from millrace.core.records import DEFAULT_POLICY, WeightUpdate
from millrace.core.spans import Timeline
from millrace.models.devices import (
    check_free_memory,
    resolve_device,
    resolve_dtype,
    use_device,
    use_threads,
)
from millrace.models.directory import load_tokenizer, text_config, weights_identity
from millrace.training.adapters.past_versions import PastVersions
from millrace.training.build import build_sender, build_trainers, load_base, seed_everything
from millrace.training.checkpoints.directory import read_run_state
from millrace.training.checkpoints.snapshot import CheckpointWriter
from millrace.training.parallel.ranks import Ranks, is_lost_connection, use_interface_to
from millrace.training.trainer import step_together
from millrace.weights.probe import ProbeReference
from millrace.weights.publisher import Publisher

PROGRESS_S = 0.25
MERGED = "merged"  # subfolder of a checkpoint


class TrainerWorker:
    def __init__(
        self,
        message: messages.StartTrainer,
        link: Link,
        timeline: Timeline,
        make_writer: type[CheckpointWriter] = CheckpointWriter,
    ) -> None:
        config = RunConfig.model_validate(message.config)
        config = config.trained_on(config.placement.rank(message.rank))
        use_threads(config.cluster.threads)
        device = resolve_device(config.placement.trainer[0])
        use_device(device)
        check_free_memory(config, device, num_ranks=message.num_sharing)
        # The checkpoint of an adapter holds no model, so the base model comes from the config.
        path = config.model.path if config.lora else message.checkpoint or config.model.path
        trusts = config.model.trust_remote_code
        seed_everything(config.seed)
        # Before the model is loaded: each rank loads its shard.
        self._ranks = _join_ranks(message, config, device=device)
        _check_equal(self._ranks, path, trusts=trusts)
        own = {name: RunConfig.model_validate(own) for name, (own, _) in message.policies.items()}
        # By policy; DEFAULT_POLICY is the only one, or the first.
        configs = {DEFAULT_POLICY: config, **own}
        tables, on_forward = [*configs.values()], self._on_forward
        trainers = build_trainers(tables, path=path, ranks=self._ranks, on_forward=on_forward)
        self._trainers = dict(zip(configs, trainers, strict=True))
        checkpoints = [message.checkpoint, *(folder for _, folder in message.policies.values())]
        self._steps_done = self._restore(checkpoints, several=bool(config.policies))
        self._tokenizer = load_tokenizer(path, trust_remote_code=trusts)
        self._writing_ranks = self._ranks.for_thread()
        self._writers = {
            policy: make_writer(keep=own.checkpoint.keep, ranks=self._writing_ranks)
            for policy, own in configs.items()
        }
        names = dict(zip(config.policies, self._trainers, strict=False))
        self._lagged = {name: (names[own], lag) for name, (own, lag) in config.lagged.items()}
        self._past = self._past_versions(checkpoints)
        self._pass_tokens = config.trainer.microbatch_tokens
        exports = config.lora is not None and config.lora.export_merged
        self._has_adapter, self._in_nf4 = config.lora is not None, config.in_nf4
        self._export_step = config.trainer.steps if exports else None
        # Engines that wake up need what the trainer holds for its next step.
        self._gives_memory_back = config.cluster.share_gpu == "sleep"
        self._trained_tokens, self._num_forwards, self._is_stepping = 0.0, 0, False
        self._link, self._timeline, self._reported_at = link, timeline, time.monotonic()
        reference, address = self._reference(config, device), message.own_address
        sender = partial(build_sender, ranks=self._ranks, reference=reference, own_address=address)
        self._publishers = {
            policy: Publisher(
                sender(own, folder=policy if policy in self._lagged else ""),
                emit=self._announce,
                patience_s=config.supervision.transfer_timeout_s,
                policy=policy,
                copies=self._takes_snapshots,
            )
            for policy, own in {**configs, **dict.fromkeys(self._lagged, config)}.items()
        }
        # The newest version of each that was published; engines begin with what is loaded here.
        self._sent = {policy: self._weights(policy)[0] for policy in self._publishers}
        self._warm_up(config)

    def _warm_up(self, config: RunConfig) -> None:
        """Compile layers while engines start, not in the first step."""
        if config.trainer.compile:
            self._timeline.enter("compile", busy=True)
            for trainer in self._trainers.values():
                trainer.policy.warm_up()

    @property
    def _takes_snapshots(self) -> bool:
        """Adapters are small, and ranks publish together, so none of them may drop a version."""
        return not self._gives_memory_back or self._has_adapter or not self._ranks.is_alone

    def _restore(self, checkpoints: Sequence[str | None], *, several: bool) -> int:
        """Load the checkpoint of each policy, which are of one step; returns the step. Each trainer
        counts the steps that have trained its policy: the versions."""
        for trainer, checkpoint in zip(self._trainers.values(), checkpoints, strict=True):
            if checkpoint is not None:
                trainer.restore(Path(checkpoint))
        if not several or checkpoints[0] is None:
            return self._trainers[DEFAULT_POLICY].steps_done
        return read_run_state(Path(checkpoints[0]))["step"]

    def _past_versions(self, checkpoints: Sequence[str | None]) -> dict[str, PastVersions]:
        """The past versions of policies that roles play."""
        return {
            policy: PastVersions(
                trainer.policy,
                lag=max(lags),
                version=trainer.steps_done,
                checkpoint=None if checkpoint is None else Path(checkpoint),
            )
            for (policy, trainer), checkpoint in zip(
                self._trainers.items(), checkpoints, strict=True
            )
            if (lags := [lag for own, lag in self._lagged.values() if own == policy])
        }

    def _reference(self, config: RunConfig, device: torch.device) -> ProbeReference | None:
        if not config.probes_weights or self._ranks.rank != 0:
            return None
        # An adapter is scored with the trainer's own base weights, which have another data type.
        dtype = str(resolve_dtype(config.engine.dtype, device)) if config.lora else ""
        module = self._trainers[DEFAULT_POLICY].policy.module
        if config.lora and not self._ranks.is_alone:  # no rank has all base weights
            module = load_base(config)
        name = dtype.removeprefix("torch.")
        in_fp8 = "quantization" in config.engine.in_fp8
        return ProbeReference(module, lora=config.lora, dtype=name, in_fp8=in_fp8)

    def serve(self) -> None:
        """Answer calls until Stop. Raises errors of the publisher's thread."""
        try:
            while True:
                self._timeline.enter("a batch", busy=False)
                call = self._link.receive(PROGRESS_S)
                for publisher in self._publishers.values():
                    publisher.check()
                if call is not None and not self._handle(call):
                    return
                if time.monotonic() - self._reported_at >= PROGRESS_S:
                    self._report_progress()
        finally:
            self._wait_for_writers()
            for publisher in reversed(self._publishers.values()):  # inner folders first
                publisher.close()

    def _handle(self, call: WorkerCall) -> bool:
        """Answer one call; False = stop."""
        message = call.message
        if isinstance(message, messages.BorrowWeights):
            self._lend(call, message.policy)
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
                    self._publishers[message.policy].release(message.version)
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
            self._publish()
            self._report_progress()
        return not isinstance(message, messages.Stop)

    def _publish(self) -> None:
        """Versions that are new. Those of further policies and lagged ones may not be."""
        for policy, publisher in self._publishers.items():
            version, weights = self._weights(policy)
            if version > self._sent[policy]:
                self._sent[policy] = version
                publisher.publish(version, weights)

    def _lend(self, call: WorkerCall, policy: str) -> None:
        """Rank 0 replies when the weights can be read. The others offer it their shards, which it
        does not gather if its version is still readable; the next version then replaces them."""
        publisher = self._publishers[policy]
        version, weights = self._weights(policy)
        self._sent[policy] = version
        if self._ranks.rank == 0:
            publisher.lend(
                version,
                weights,
                answer=lambda update: call.reply(messages.Published(update=update)),
            )
        else:
            publisher.publish(version, weights)
            call.reply(messages.Done())

    def _weights(self, policy: str) -> tuple[int, dict[str, Tensor]]:
        """The newest version of a policy, or one that lies behind it."""
        if policy in self._lagged:
            key, lag = self._lagged[policy]
            return self._past[key].behind(lag)
        trainer = self._trainers[policy]
        return trainer.steps_done, trainer.policy.weights()

    def _announce(self, update: WeightUpdate) -> None:
        """Announce a version; runs in the publisher's thread."""
        if self._ranks.rank == 0:
            self._link.emit(messages.Published(update=update))
        else:
            self._publishers[update.policy].release(update.version)  # rank 0 holds its bytes

    def _step(self, message: messages.TrainStep) -> messages.Stepped:
        made = message.version if message.updates else message.version + 1
        first = self._trainers[DEFAULT_POLICY]
        assert made == self._steps_done + 1, "steps are done in order"
        self._timeline.enter("step" if message.updates else "evaluate", busy=True)
        self._is_stepping = True
        for trainer in self._trainers.values():
            if message.max_rows is not None:
                trainer.limit_rows(message.max_rows)
        if not message.updates:
            metrics = {"loss": first.held_out_loss(message.batch)}
            self._is_stepping = False
            return messages.Stepped(version=message.version, metrics=metrics)
        batches: dict[str, list[Batch]] = {policy: [] for policy in self._trainers}
        for batch in (message.batch, *message.more):
            batches[batch.policy].append(batch)
        work = [(trainer, tuple(batches[policy])) for policy, trainer in self._trainers.items()]
        for publisher in self._publishers.values():
            publisher.finish_reading()
        found = step_together(work, pass_tokens=self._pass_tokens)
        self._steps_done = made
        for policy, past in self._past.items():
            past.add(self._trainers[policy].steps_done)
        self._is_stepping = False
        if self._gives_memory_back:
            for trainer in self._trainers.values():
                trainer.policy.free_gradient()
            torch.cuda.empty_cache()  # does nothing without a GPU
        self._trained_tokens += sum(metrics["batch/trained_tokens"] for metrics in found)
        replies = {
            policy: messages.Stepped(
                version=message.version,
                metrics=metrics,
                skipped=trainer.skipped,
                reported=trainer.reported,
            )
            for (policy, trainer), metrics in zip(self._trainers.items(), found, strict=True)
        }
        return msgspec.structs.replace(replies.pop(DEFAULT_POLICY), others=replies)

    def _wait_for_writers(self) -> None:
        for writer in self._writers.values():
            writer.wait()

    def _save(self, call: WorkerCall, message: messages.SaveCheckpoint) -> None:
        """Copy the state. A thread writes it and replies while steps continue."""
        self._timeline.enter("checkpoint", busy=True)
        self._wait_for_writers()  # before the copy: the host holds one snapshot at a time
        trainer = self._trainers[message.policy]
        directory, step = Path(message.directory), self._steps_done
        is_exported = step == self._export_step
        try:
            snapshot = trainer.snapshot(merged_into=MERGED if is_exported else None)
        except (MemoryError, RuntimeError) as error:
            if is_lost_connection(error):
                raise
            # Other ranks may be in the middle of a collective: only one rank alone can continue.
            kind = CheckpointError if self._ranks.is_alone else RunFailed
            raise kind(
                f"Checkpoint {str(directory)!r} could not be made: the trainer's state could not be"
                f" copied to the host ({storage.reason(error)}); it needs"
                f" {trainer.state_bytes()} bytes of memory there."
            ) from error
        past = self._past.get(message.policy)
        writes = [] if past is None else [past.writer()]
        call.send_part(messages.Copied())
        # While a sharded model is written, its parts are on the disk as well.
        is_sharded = not self._ranks.is_alone and (is_exported or not self._has_adapter)
        num_models = is_exported + is_sharded

        def write(folder: Path) -> None:
            snapshot.write(folder, self._writing_ranks)
            for write_past in writes:
                write_past(folder)
            if self._ranks.rank == 0:
                self._tokenizer.save_pretrained(folder)
                if is_exported:
                    self._tokenizer.save_pretrained(folder / MERGED)

        def reply(error: BaseException | None, complaint: str | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                call.reply(messages.Saved(version=step, complaint=complaint))

        self._writers[message.policy].begin(
            directory,
            write=write,
            run_state={
                "step": step,
                "version": trainer.steps_done,
                # An adapter belongs to the values of its base.
                **({"quantization": "nf4"} if self._in_nf4 else {}),
                **message.run_state,
            },
            needed_bytes=trainer.state_bytes() + num_models * trainer.policy.merged_bytes(),
            on_done=reply,
        )

    def _report_progress(self) -> None:
        steps_done = float(self._steps_done)
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


def _check_equal(ranks: Ranks, path: str, *, trusts: bool) -> None:
    """Raise if ranks have different packages or models."""
    if not ranks.is_alone:
        found = text_config(path, trust_remote_code=trusts)
        facts = {name: version(name) for name in ("millrace", "torch", "transformers")}
        facts["model config"] = sha256(found.to_json_string().encode()).hexdigest()[:12]
        facts["model weights"] = weights_identity(path)[:12]
        ranks.check_equal(facts)


def _join_ranks(
    message: messages.StartTrainer, config: RunConfig, *, device: torch.device
) -> Ranks:
    if message.peer_address:
        use_interface_to(message.peer_address)
    return Ranks.join(
        config.trainer.mesh_sizes,
        rank=message.rank,
        rendezvous=message.rendezvous,
        device=device,
        backend="gloo" if message.shares_device else None,  # NCCL shares no GPU
        timeout_s=config.supervision.stall_timeout_s,  # a hung rank is found before that
    )


if __name__ == "__main__":
    run_module(messages.StartTrainer, TrainerWorker)
