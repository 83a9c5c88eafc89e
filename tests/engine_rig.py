"""Engines over tiny models, and what plain transformers says about the tokens they sampled."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from architectures import MIXTURE, VOCAB, tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from millrace.config import LoraConfig
from millrace.core.records import Completion, Request, Sampling
from millrace.inference.backend import FinishedCompletions
from millrace.inference.embedded.adapters import AdapterMerger
from millrace.inference.embedded.decode.fp8_layers import quantize_layers
from millrace.inference.embedded.decode.splits import plan_splits
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.kv.paged_attention import PAGED_ATTENTION
from millrace.inference.embedded.parts import EngineSizes
from millrace.models.devices import use_threads
from millrace.models.lora.factors import Adapter, adapter_of
from millrace.models.routing import find_routing
from millrace.models.support import use_own_classes

# On tensors this small, a second thread only spins. As in a worker, so that the rounding of a test
# does not depend on which tests ran before it in the same process.
use_threads(1)

EOS = 2
_MOST_KV_HEADS = 64  # of the tests of decode attention
LETTERS = [chr(ord("0") + i) for i in range(VOCAB - 3)]  # token 3 + i


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per token."""
    names = ["<pad>", "<bos>", "<eos>", *LETTERS]
    vocab = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as load_model() gives it in this dtype: rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_engine(
    architecture: str = "qwen3",
    *,
    seed: int = 0,
    num_layers: int = 2,
    eos_ids: Sequence[int] = (EOS,),
    device: str = "cpu",
    lora: LoraConfig | None = None,
    residents: Mapping[str, Adapter] | None = None,
    dtype: torch.dtype = torch.float32,
    records_routes: bool = False,
    version: int = 0,
    memory: EngineMemory | None = None,
    in_fp8: bool = False,
    **settings: Any,
) -> EmbeddedEngine:
    """Small blocks and chunks, so that a few tokens cross many boundaries. `in_fp8`: the products
    of its layers."""
    model = cast(tiny_model(architecture, seed=seed, num_layers=num_layers).to(device), dtype)
    model.set_attn_implementation(PAGED_ATTENTION)
    use_own_classes(model)
    merger, adapters = None, {**(residents or {})}
    if lora is not None and lora.apply == "unmerged":
        adapters = {None: adapter_of(model, lora), **adapters}
    elif lora is not None:
        merger = AdapterMerger(model, adapter_of(model, lora))
    if in_fp8:
        quantize_layers(model)
    sizes = {
        "max_context": 128,
        "max_sequences": 8,
        "num_blocks": 256,
        "block_tokens": 4,
        "prefill_tokens": 64,
        "num_snapshots": 64,
    }
    return EmbeddedEngine(
        model,
        letter_tokenizer(),
        sizes=EngineSizes(**{**sizes, **settings}),
        version=version,
        eos_ids=eos_ids,
        merger=merger,
        adapters=adapters,
        routing=find_routing(model) if records_routes else None,
        memory=memory,
    )


def save_model(directory: Path, architecture: str = "qwen3") -> None:
    """A model directory, as a run would be given it."""
    model = tiny_model(architecture)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(directory)
    letter_tokenizer().save_pretrained(directory)


def weights(architecture: str = "qwen3", *, seed: int) -> dict[str, torch.Tensor]:
    """Complete weights for another version."""
    return {n: p.detach() for n, p in tiny_model(architecture, seed=seed).named_parameters()}


def prompt_of(length: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def make_request(
    id: str = "r",
    *,
    prompt: np.ndarray | int = 6,
    n: int = 1,
    seed: int = 0,
    routes_from: int | None = None,
    **sampling: Any,
) -> Request:
    """`prompt`: its tokens, or how many of them."""
    tokens = prompt_of(prompt) if isinstance(prompt, int) else prompt
    settings = Sampling(**{"max_new_tokens": 16, **sampling})
    return Request(id=id, prompt=tokens, n=n, seed=seed, sampling=settings, routes_from=routes_from)


class Collected:
    """The completions that an engine has returned."""

    def __init__(self) -> None:
        self._completions: dict[str, dict[int, Completion]] = {}

    def add(self, finished: Sequence[FinishedCompletions]) -> None:
        for one in finished:
            self._completions.setdefault(one.id, {}).update(one.completions)

    def by_request(self) -> dict[str, list[Completion]]:
        return {id: [own[i] for i in sorted(own)] for id, own in self._completions.items()}


def finish_all(
    engine: EmbeddedEngine,
    requests: Sequence[Request] = (),
    *,
    collected: Collected | None = None,
    max_steps: int = 2000,
) -> dict[str, list[Completion]]:
    """Submit, and step until nothing is left; completions by request, with those `collected`."""
    for request in requests:
        engine.add_request(request)
    collected = collected or Collected()
    for _ in range(max_steps):
        if not engine.has_work:
            return collected.by_request()
        collected.add(engine.step())
    raise AssertionError(f"no end after {max_steps} steps: {engine.stats()}")


def plain_logits(
    model: PreTrainedModel, prompt: np.ndarray, completion: Completion
) -> torch.Tensor:
    """[N, V] logits for each sampled token, by one plain forward pass of transformers."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens])).long()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float()


class _RecordedChoice:
    """A router's own choice, to be looked at."""

    def choose(self, own: torch.Tensor, *, scores: torch.Tensor) -> torch.Tensor:
        self.chosen = own
        return own


def plain_routes(
    tokens: np.ndarray, *, architecture: str = MIXTURE, seed: int = 0
) -> np.ndarray:  # [L, layers, top_k]
    """Where one plain forward pass of transformers sends these tokens."""
    model, rules = _recording_model(architecture, seed)
    with torch.no_grad():
        model(input_ids=torch.from_numpy(tokens).long()[None])
    return torch.stack([rule.chosen for rule in rules], 1).numpy().astype(np.uint8)


@functools.cache
def _recording_model(architecture: str, seed: int) -> tuple[PreTrainedModel, list[_RecordedChoice]]:
    model = tiny_model(architecture, seed=seed)
    use_own_classes(model)
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):  # in a batch of one, places are positions
            vars(module)["attn_temperature_tuning"] = True
    routing = find_routing(model)
    assert routing is not None
    rules = [_RecordedChoice() for _ in routing.routers]
    routing.install(rules)
    return model, rules


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[N, V] logprobs after temperature and transformers' own truncation; -inf = ruled out."""
    scores = logits / (sampling.temperature or 1.0)
    no_ids = torch.empty(0)
    if sampling.truncates and sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(no_ids, scores)
    if sampling.truncates and sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(no_ids, scores)
    if sampling.truncates and sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(no_ids, scores)
    return scores.log_softmax(-1)


def assert_sampled_from(
    logits: torch.Tensor, completion: Completion, sampling: Sampling, *, tolerance: float = 1e-5
) -> None:
    """The completion's logprobs and kept ids are those of these logits [N, V]."""
    expected = distribution(logits, sampling)
    tokens = torch.from_numpy(completion.tokens.astype(np.int64))
    chosen = expected.gather(-1, tokens[:, None]).squeeze(-1).numpy()
    np.testing.assert_allclose(completion.logprobs, chosen, rtol=0, atol=tolerance)
    if not sampling.truncates:
        assert completion.kept is None
        return
    assert completion.kept is not None
    assert len(completion.kept.offsets) == len(tokens) + 1
    rows = np.split(completion.kept.ids, completion.kept.offsets[1:-1])
    for row, logprobs in zip(rows, expected, strict=True):
        allowed = torch.isfinite(logprobs).nonzero().squeeze(-1).numpy()
        np.testing.assert_array_equal(row if len(row) else np.arange(VOCAB), allowed)


def assert_same(left: Completion, right: Completion) -> None:
    """Same tokens and, up to the rounding of both, same logprobs."""
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=3e-5)
    assert (left.kept is None) == (right.kept is None)
    if left.kept is not None and right.kept is not None:
        np.testing.assert_array_equal(left.kept.ids, right.kept.ids)
        np.testing.assert_array_equal(left.kept.offsets, right.kept.offsets)


def split_work(num_rows: int, splits: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Splits and arrivals of a decode step in which most rows have this many splits, and their
    number; some programs do nothing if there are several."""
    counts = np.full(num_rows, splits)
    counts[::5] = 1
    num_splits = int(counts.sum()) + (0 if splits == 1 else 5)
    plan = plan_splits(counts, num_rows=num_rows, num_splits=num_splits)
    arrivals = torch.zeros(num_rows, _MOST_KV_HEADS, dtype=torch.int32)
    return torch.from_numpy(plan), arrivals, num_splits
