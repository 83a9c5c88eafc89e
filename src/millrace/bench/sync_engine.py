"""An engine of `millrace bench sync`: the real one, with random weights of a known shape.

The weights are drawn on the engine's device. Writing a model and reading it again would take
minutes before the first token.
"""

import torch

from millrace.bench.shapes import make_model
from millrace.cluster.link import Link, run_worker
from millrace.cluster.messages import StartEngine
from millrace.config import RunConfig
from millrace.core.spans import Timeline
from millrace.inference.embedded.build import applied_adapters, engine_of
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION
from millrace.inference.worker import wire
from millrace.models.loading import resolve_device, resolve_dtype


def main(link: Link, name: str) -> None:
    call = link.receive(None)
    assert call is not None
    assert isinstance(call.message, StartEngine)
    config = RunConfig.model_validate(call.message.config)
    torch.set_num_threads(config.engine.threads or 1)
    device = resolve_device(config.placement.engine(0))
    model, tokenizer = make_model(
        config.model.path,
        dtype=resolve_dtype(config.engine.dtype, device),
        device=device,
        attention=PAGED_ATTENTION,
    )
    merger, adapters = applied_adapters(model, config=config.engine, lora=config.lora)
    engine = engine_of(
        model, tokenizer, config=config.engine, version=0, merger=merger, adapters=adapters
    )
    worker = wire(engine, config, link=link, timeline=Timeline(name))
    call.reply()
    worker.serve()


if __name__ == "__main__":
    run_worker(main)
