"""Tokens per second of vLLM with the models, prompts and sampling of `millrace bench engine`.

    python benchmarks/vllm_generation.py qwen3-1.7b --json FILE

It needs vLLM, and Millrace in the same environment (`pip install --no-deps -e .`). As in the bench,
each row generates `batch` completions of different random prompts at temperature 1 with logprobs,
after a short warm-up, and the rate includes prefill. Two things favour vLLM: it makes no text of
the tokens, and no completion ends early. A shape gets random weights.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.bench import write_result
from millrace.bench.workloads import chosen_device, described, make_model, shapes
from millrace.models.attention.packed import PACKED


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help=f"shape ({', '.join(shapes())}) or model directory")
    parser.add_argument("--batch", type=int, nargs="+", help="sequences decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, help="of each sequence (512; on a CPU 64)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile or use graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    args = parser.parse_args()
    device, dtype = chosen_device(args)
    rows = measure(args, device=device, dtype=dtype)
    print(f"{'model':<14}{'batch':>6}{'tokens/s':>12}{'start s':>9}")
    for row in rows:
        name, rate = Path(row["model"]).name, row["tokens_per_s"]
        print(f"{name:<14}{row['batch']:>6}{rate:>12,.0f}{row['cold_start_s']:>9.1f}")
    write_result(rows, args.json)


def measure(
    args: argparse.Namespace, *, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """One row per batch size, all from one engine."""
    import vllm

    on_gpu, prompt_tokens = device.type == "cuda", args.prompt_tokens
    batches = args.batch or ([64, 256] if on_gpu else [8, 32])
    new_tokens = args.new_tokens or (512 if on_gpu else 64)
    with ExitStack() as stack:
        directory = args.model
        if directory in shapes():
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            _save_random_model(args.model, directory, device=device, dtype=dtype)
        started_s = time.perf_counter()
        engine = vllm.LLM(
            directory,
            dtype=described(device, dtype)["dtype"],
            skip_tokenizer_init=True,
            max_model_len=prompt_tokens + new_tokens,
            max_num_seqs=max(batches),
            enforce_eager=args.enforce_eager,
        )
    generator = Generator(engine, prompt_tokens=prompt_tokens)
    generator.generate(1, new_tokens=1)
    start_s = time.perf_counter() - started_s
    rows = []
    for batch in batches:
        generator.generate(batch, new_tokens=min(40, new_tokens))
        before_s = time.perf_counter()
        tokens = generator.generate(batch, new_tokens=new_tokens)
        rows.append(
            {
                "model": args.model,
                "vllm": vllm.__version__,
                **described(device, dtype),
                "batch": batch,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "tokens_per_s": tokens / (time.perf_counter() - before_s),
                "cold_start_s": start_s,
            }
        )
    return rows


def _save_random_model(
    name: str, directory: str, *, device: torch.device, dtype: torch.dtype
) -> None:
    model, _ = make_model(name, dtype=dtype, device=device, attention=PACKED)
    model.save_pretrained(directory)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM claims most of the memory


class Generator:
    """Random prompts, new ones at each call, so that the prefix cache does not help."""

    def __init__(self, engine: Any, *, prompt_tokens: int):
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._num_generated = 0

    def generate(self, batch: int, *, new_tokens: int) -> int:
        """Tokens generated for `batch` different prompts."""
        from vllm import SamplingParams

        random = np.random.default_rng(self._num_generated)
        prompts = random.integers(3, 1000, (batch, self._prompt_tokens)).tolist()
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        self._num_generated += tokens
        return tokens


if __name__ == "__main__":
    main()
