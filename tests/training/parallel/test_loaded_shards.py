"""No rank ever holds the whole model, not even while it loads."""

import ctypes
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from millrace.bench import ranks as bench
from millrace.bench.rank_processes import run_ranks
from millrace.bench.workloads import shape_of
from millrace.core.microbatch import MeshSizes
from millrace.training.parallel.ranks import Ranks

FEATURES = bench.FEATURES
M_MMAP_THRESHOLD = -3  # of malloc.h


def anonymous_bytes() -> int:
    """Memory of this process, without files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def peak_of_loading(ranks: Ranks, name: str, folder: Path) -> list[int]:
    """How much the memory of each rank grows at most while it loads the model."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # else glibc keeps what torch has freed
    feature = FEATURES[name]
    warm_up, _ = bench.make_trainer(feature, ranks, folder / "small", device="cpu")
    del warm_up
    before, is_loaded, seen = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not is_loaded.wait(0.001):
            seen.append(anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    trainer, _ = bench.make_trainer(feature, ranks, folder, device="cpu")
    is_loaded.set()
    watcher.join()
    assert trainer.policy.weights()
    return ranks.gather(max(seen), int)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("grpo", "fsdp 4"), ("mixture", "tp 2 ep 2"), ("bfloat16 lora", "fsdp 4")],
)
def test_no_rank_holds_the_whole_model_while_it_loads(tmp_path, name, mesh):
    (tmp_path / "small").mkdir()
    is_mixture = FEATURES[name].is_mixture
    bench._make_model(tmp_path / "small", is_mixture=is_mixture)
    is_half = name == "bfloat16 lora"
    sizes = (4096, 512, 1536, 24, 8, 4, 64, 4096)  # a rank gathers one of the layers at a time
    mlp = 384 if is_half else 192  # of an expert
    experts = {"moe_intermediate_size": mlp, "num_experts": 8, "num_experts_per_tok": 2}
    kind, more = (Qwen3MoeConfig, experts) if is_mixture else (Qwen3Config, {})
    model = AutoModelForCausalLM.from_config(shape_of(kind, *sizes, **more))
    # What stays as it is in the file is mapped, not loaded.
    model.to(torch.float32 if is_half else torch.bfloat16)
    num_bytes = sum(p.numel() for p in model.parameters()) * (2 if is_half else 4)
    model.save_pretrained(tmp_path / bench._model_name(is_mixture=is_mixture))
    del model
    meshes = bench.MESHES[mesh]
    peaks = run_ranks(peak_of_loading, name, tmp_path, sizes=meshes)
    # A search for routers makes a pass at the end, which gathers layers.
    share = num_bytes / meshes.num_ranks
    assert all(share < peak < 0.8 * num_bytes for peak in peaks), (peaks, num_bytes)
    if name == "grpo":
        (alone,) = run_ranks(peak_of_loading, name, tmp_path, sizes=MeshSizes())
        assert alone > num_bytes  # the whole model is seen
