"""No rank ever holds the whole model, not even while it loads."""

import ctypes
import threading
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.core.microbatch import MeshSizes
from millrace.training.parallel.ranks import Ranks

NUM_RANKS = 4
_M_MMAP_THRESHOLD = -3  # of mallopt() in malloc.h


def anonymous_bytes() -> int:
    """Memory of this process, without files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def peak_of_loading(ranks: Ranks, folder: Path) -> list[int]:
    """How much the memory of each rank grows at most while it loads the model."""
    # The C library would keep freed buffers of gathered layers for later: up to twice the model.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    warm_up, _ = bench.make_trainer(bench.FEATURES["grpo"], ranks, folder / "small", device="cpu")
    del warm_up
    before, is_loaded, seen = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not is_loaded.wait(0.001):
            seen.append(anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    trainer, _ = bench.make_trainer(bench.FEATURES["grpo"], ranks, folder, device="cpu")
    is_loaded.set()
    watcher.join()
    assert trainer.policy.weights()
    return ranks.gather(max(seen), int)


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_while_it_loads(tmp_path):
    (tmp_path / "small").mkdir()
    bench._make_model(tmp_path / "small", is_mixture=False)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=24,  # a rank gathers one of them at a time
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    model = Qwen3ForCausalLM(config)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.bfloat16()  # what stays as it is in the file is mapped, not loaded
    model.save_pretrained(tmp_path / bench._model_name(is_mixture=False))
    del model
    peaks = run_ranks(peak_of_loading, tmp_path, sizes=MeshSizes(dp_shard=NUM_RANKS))
    # A search for routers makes a pass at the end, which gathers layers.
    assert all(num_bytes / NUM_RANKS < peak < 0.8 * num_bytes for peak in peaks), peaks
    (alone,) = run_ranks(peak_of_loading, tmp_path, sizes=MeshSizes())
    assert alone > num_bytes  # the whole model is seen
