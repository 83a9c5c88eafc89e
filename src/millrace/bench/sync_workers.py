"""The engine and the trainer processes of `millrace bench sync`.

An engine is the real one, with random weights of a known shape. They are drawn on its device:
writing a model and reading it again would take minutes before the first token. The trainer changes
and publishes its weights for each step, and trains nothing; the publisher and its transport are the
real ones.
"""

import contextlib
import time
from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM

from millrace.bench.workloads import make_model, shape_named
from millrace.cluster import messages
from millrace.cluster.link import Link, run_worker
from millrace.config import RunConfig
from millrace.core.records import WeightUpdate
from millrace.core.spans import Timeline
from millrace.inference.backend import EmbeddedBackend, load_backend
from millrace.inference.embedded.build import applied_adapters, engine_of
from millrace.inference.embedded.decode.fp8_layers import quantize_layers
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.self_test import engine_path
from millrace.inference.worker import EngineWorker, wire
from millrace.models.devices import resolve_device, resolve_dtype, use_threads
from millrace.models.lora.factors import adapter_of
from millrace.training.build import build_sender
from millrace.weights.publisher import Publisher

CHANGED_EVERY = 50  # with payload = "delta" every 50th value changes: 2 %


def main(link: Link, name: str) -> None:
    call = link.receive(None)
    assert call is not None
    assert isinstance(call.message, messages.StartEngine | messages.StartTrainer)
    config = RunConfig.model_validate(call.message.config)
    use_threads(config.cluster.threads or 1)
    if isinstance(call.message, messages.StartEngine):
        worker = build_engine_worker(config, link=link, name=name)
        call.reply()
        worker.serve()
        return
    weights = make_weights(config)

    def emit(update: WeightUpdate) -> None:
        link.emit(messages.Published(update=update))

    with contextlib.closing(Publisher(build_sender(config), emit=emit)) as publisher:
        call.reply()
        serve_trainer(link, publisher, weights=weights, config=config)


def build_engine_worker(config: RunConfig, *, link: Link, name: str) -> EngineWorker:
    return wire(build_engine(config), config, link=link, timeline=Timeline(name))


def build_engine(config: RunConfig) -> EmbeddedEngine:
    options = load_backend(config.engine)
    assert isinstance(options, EmbeddedBackend), "the bench sets no other"
    device = resolve_device(config.placement.engine(0))
    dtype = resolve_dtype(config.engine.dtype, device)
    path = config.model.path
    model, tokenizer = make_model(path, dtype=dtype, device=device, attention=engine_path(device))
    merger, adapters = applied_adapters(model, config=config.engine, lora=config.lora)
    if options.quantization == "fp8":
        quantize_layers(model)  # the merger has copied the 16-bit weights
    return engine_of(
        model,
        tokenizer,
        config=config.engine,
        version=0,
        merger=merger,
        adapters=adapters,
        options=options,
    )


def make_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Random weights of the model or an adapter, by the names that an engine expects."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_named(config.model.path))
    if config.lora is None:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    else:
        shapes = adapter_of(model, config.lora).shapes()
    device = resolve_device(config.placement.trainer[0])
    draw = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(shape, device=device).normal_(std=0.02, generator=draw)
        for name, shape in shapes.items()
    }


def serve_trainer(
    link: Link, publisher: Publisher, *, weights: Mapping[str, torch.Tensor], config: RunConfig
) -> None:
    """Publish new weights for each step, until Stop."""
    while True:
        publisher.check()
        call = link.receive(0.25)
        if call is None:
            continue
        match call.message:
            case messages.TrainStep(version=version):
                for weight in weights.values():  # what an optimizer step would do
                    if config.weights.payload == "delta":
                        weight.view(-1)[::CHANGED_EVERY] *= 1.1
                    else:
                        weight *= 1.001
                _wait_for_gpu()
                started_s = time.monotonic()
                publisher.publish(version, weights)
                _wait_for_gpu()
                # When it began, and how long it blocked the trainer.
                stall_ms = (time.monotonic() - started_s) * 1000
                metrics = {"started_s": started_s, "stall_ms": stall_ms}
                call.reply(messages.Stepped(version=version, metrics=metrics))
            case messages.Release(version=version):
                publisher.release(version)
                call.reply()
            case _:
                call.reply()
                return


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        # The publisher's own stream continues: only the wait of the next step counts.
        torch.cuda.current_stream().synchronize()


if __name__ == "__main__":
    run_worker(main)
