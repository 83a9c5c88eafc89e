"""The largest dense model that trains end to end on one GPU, with and without engines that sleep.

    python benchmarks/largest_model.py --limit-s 180

Models are stacks of layers of one shape. An attempt is a whole run in processes of its own; a model
trains if the run finishes STEPS steps. The sizes of the settings are searched in turn until the
time is up. The first is an estimate of what fits; then two layers more or fewer until one attempt
trains and one fails, then halves. Prints a line of JSON for each attempt, with the whole errors of
the processes that failed, and one line for each setting at the end. Attempts write no checkpoint.
This process uses no memory of the GPU.
"""

import argparse
import json
import shutil
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from millrace.bench.workloads import shape_named
from millrace.compare.runs import used_gpu_mib
from millrace.demo.model import build_tokenizer

STEPS = 3  # the third has optimizer state, and engines have staged two versions
STRIDE = 2  # layers
ATTEMPT_S = 120.0
# For the first sizes: bytes on the GPU per weight, as docs/how-to/share-one-gpu.md counts them, and
# what does not depend on the layers: head, activations, CUDA contexts and graphs.
BYTES_PER_WEIGHT = {"sleep": 16, "take_turns": 26}
OTHER_BYTES = 10 * 2**30
MIN_ATTEMPT_S = 25.0  # an attempt is not begun with less time left
FREE_MIB = 2048.0  # of GPU memory that is in use without a run
SHARED_MEMORY = Path("/dev/shm")
REWARDS = """
def reward(completions, **columns):
    return [len(set(text)) / (len(text) + 1) for text in completions]
"""
SETTINGS = """
model = {model}
run_dir = {run_dir}
scorers = [{{ function = "rewards.py:reward" }}]
[tasks]
path = "tasks.jsonl"
[sampling]
max_new_tokens = {max_new_tokens}
[rollout]
group_size = 8
[trainer]
steps = 1000
groups_per_step = 8
gradient_checkpointing = true
[engine]
max_sequences = 64
max_context = {max_context}
options = {{ compile = false, kv_bytes = {kv_bytes} }}
[cluster]
share_gpu = {share_gpu}
[supervision]
max_restarts = 0
[checkpoint]
every_steps = 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="shape of the layers (qwen3-8b)")
    parser.add_argument("--kv-gib", type=float, default=12.0, help="of the KV cache (12)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of a completion (128)")
    parser.add_argument("--max-context", type=int, default=2048, help="of the engine (2048)")
    settings = [*BYTES_PER_WEIGHT]
    parser.add_argument("--share-gpu", nargs="+", choices=settings, default=settings)
    parser.add_argument("--layers", type=int, help="of the first attempts, instead of an estimate")
    parser.add_argument("--limit-s", type=float, default=180.0, help="of all attempts (180)")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.limit_s
    with tempfile.TemporaryDirectory(dir=_scratch()) as folder:
        models = Models(shape_named(args.model), Path(folder))
        searches = [
            Search(name, first=args.layers or models.estimate(name, kv_gib=args.kv_gib))
            for name in args.share_gpu
        ]
        while open_searches := [search for search in searches if search.next_layers]:
            for search in open_searches:
                left_s = deadline_s - time.monotonic()
                if left_s < MIN_ATTEMPT_S:
                    break
                attempt(search, models, args, limit_s=min(ATTEMPT_S, left_s))
            else:
                continue
            break
    for search in searches:
        sizes = {"largest": search.trained, "smallest_failed": search.failed}
        found = {name: size and models.num_parameters(size) for name, size in sizes.items()}
        print(json.dumps({"share_gpu": search.share_gpu, **found}), flush=True)


@dataclass(eq=False)
class Search:
    """The largest number of layers that trains with one setting of cluster.share_gpu."""

    share_gpu: str
    first: int
    trained: int | None = None  # the most layers
    failed: int | None = None  # the fewest layers
    is_over: bool = False  # an attempt took too long, or failed for another reason than memory

    @property
    def next_layers(self) -> int | None:
        """None if there is nothing left to try."""
        if self.is_over:
            return None
        if self.trained is None:
            layers = self.first if self.failed is None else self.failed - STRIDE
            return layers if layers > 0 else None
        if self.failed is None:
            return self.trained + STRIDE
        return (self.trained + self.failed) // 2 if self.failed > self.trained + 1 else None


class Models:
    """Model directories that share the files of their layers, which are all alike."""

    def __init__(self, config: PreTrainedConfig, folder: Path) -> None:
        self.folder = folder
        self._shape = config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._config(1), dtype=torch.bfloat16)
        tied = set(getattr(model, "all_tied_weights_keys", ()))
        state = {name: drawn(t) for name, t in model.state_dict().items() if name not in tied}
        self._layer = {n: t for n, t in state.items() if ".layers.0." in n}
        self._rest = {n: t for n, t in state.items() if n not in self._layer}
        self._write("rest", self._rest)

    def num_parameters(self, layers: int) -> int:
        each, rest = (sum(t.numel() for t in of.values()) for of in (self._layer, self._rest))
        return layers * each + rest

    def estimate(self, share_gpu: str, *, kv_gib: float) -> int:
        """Layers of the largest model that should train."""
        others = OTHER_BYTES + (0 if share_gpu == "sleep" else kv_gib * 2**30)
        room = (total_gpu_bytes() - others) / BYTES_PER_WEIGHT[share_gpu]
        rest = self.num_parameters(0)
        return max(1, int((room - rest) / (self.num_parameters(1) - rest)))

    def write(self, layers: int) -> Path:
        folder = self.folder / f"model-{layers}"
        folder.mkdir(exist_ok=True)
        self._config(layers).save_pretrained(folder)
        build_tokenizer(string.ascii_letters).save_pretrained(folder)
        files = {"rest": list(self._rest)}
        for number in range(layers):
            part = f"layer-{number}"
            of_layer = {n.replace(".0.", f".{number}.", 1): t for n, t in self._layer.items()}
            self._write(part, of_layer)
            files[part] = list(of_layer)
        weight_map = {}
        for part, names in files.items():
            file = folder / f"{part}.safetensors"
            if not file.exists():
                file.hardlink_to(self.folder / file.name)
            weight_map |= dict.fromkeys(names, file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def _config(self, layers: int) -> PreTrainedConfig:
        sizes = {"num_hidden_layers": layers, "layer_types": None, "max_window_layers": layers}
        architectures = {"architectures": ["Qwen3ForCausalLM"]}
        return type(self._shape).from_dict({**self._shape.to_dict(), **sizes, **architectures})

    def _write(self, part: str, tensors: dict[str, torch.Tensor]) -> None:
        file = self.folder / f"{part}.safetensors"
        if not file.exists():
            save_file(tensors, file, metadata={"format": "pt"})


def drawn(shape: torch.Tensor) -> torch.Tensor:
    """Weights that a model can begin with; drawing each number would take the host too long."""
    if shape.ndim < 2:  # of a norm
        return torch.ones(shape.shape, dtype=shape.dtype)
    generator = torch.Generator().manual_seed(shape.numel())
    few = torch.empty(1_000_003).normal_(std=0.02, generator=generator).to(shape.dtype)
    return few.repeat(-(-shape.numel() // len(few)))[: shape.numel()].view(shape.shape).clone()


def total_gpu_bytes() -> float:
    """The memory of the first GPU, as nvidia-smi reports it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(reply.split()[0]) * 2**20


def attempt(search: Search, models: Models, args: argparse.Namespace, *, limit_s: float) -> None:
    layers = search.next_layers
    assert layers is not None
    started_s = time.monotonic()
    folder = models.folder / f"{search.share_gpu}-{layers}"
    folder.mkdir()
    settings = {
        "model": json.dumps(str(models.write(layers))),
        "run_dir": json.dumps(str(folder / "run")),
        "share_gpu": json.dumps(search.share_gpu),
        "kv_bytes": int(args.kv_gib * 2**30),
        "max_new_tokens": args.max_new_tokens,
        "max_context": args.max_context,
    }
    (folder / "run.toml").write_text(SETTINGS.format(**settings))
    (folder / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": letter * 4}) for letter in "abcdefghijklmnop"]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    found = run(folder, until_s=started_s + limit_s)
    if found["trains"]:
        search.trained = layers
    elif found["trains"] is None:
        search.is_over = True
    else:
        search.failed = layers
    about = {"share_gpu": search.share_gpu, "layers": layers}
    size = {"parameters": models.num_parameters(layers)}
    print(json.dumps({**about, **size, **found, "s": time.monotonic() - started_s}), flush=True)


def run(folder: Path, *, until_s: float) -> dict[str, Any]:
    """Whether a run finishes its first steps; None if that is not known: it is still at it when the
    time is up, or it fails for another reason than memory."""
    log, metrics = folder / "train.log", folder / "run" / "metrics.jsonl"
    command = [sys.executable, "-m", "millrace", "train", "run.toml"]
    trains, peak_mib = None, 0.0
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            while trains is None and time.monotonic() < until_s:
                has_ended = process.poll() is not None
                if metrics.is_file() and metrics.read_text().count("\n") >= STEPS:
                    trains = True
                elif has_ended:
                    trains = False
                peak_mib = max(peak_mib, used_gpu_mib())
                time.sleep(0.25)
        finally:
            stop(process)
    said = errors(folder)
    text = " ".join(said.values())
    if trains is False and "memory" not in text.lower() and "GiB" not in text:
        trains = None
    return {"trains": trains, "peak_mib": peak_mib, **({} if trains else {"said": said})}


def errors(folder: Path) -> dict[str, str]:
    """The last line of the run's own output, and of the log of each process that failed."""
    said: dict[str, str] = {}
    for log in [folder / "train.log", *sorted((folder / "run" / "logs").glob("*.log"))]:
        text = log.read_text(errors="replace")
        if log.stem == "train" or "Traceback" in text:
            said[log.stem] = next((x for x in reversed(text.splitlines()) if x.strip()), "")
    return said


def stop(process: subprocess.Popen[bytes]) -> None:
    """Without a checkpoint: workers die with the controller. Returns when the GPU is free again."""
    process.kill()
    process.wait()
    patience_s = time.monotonic() + 10
    while used_gpu_mib() > FREE_MIB and time.monotonic() < patience_s:
        time.sleep(0.25)


def _scratch() -> Path | None:
    """Shared memory if it holds the largest models, else the folder for temporary files."""
    is_large = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 32 * 2**30
    return SHARED_MEMORY if is_large else None


if __name__ == "__main__":
    main()
