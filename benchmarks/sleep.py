"""What it costs an engine to sleep and wake up, beside the bare copies between GPU and host.

    python benchmarks/sleep.py --model qwen3-1.7b

Needs a GPU. Prints one line of JSON: bytes that sleep gives back, seconds of sleep and of wake, and
seconds of plain copies of the weights from and to pinned host memory, which are the floor.
"""

import argparse
import json
from functools import partial

import torch

from millrace.bench.workloads import best_s, make_model, shapes
from millrace.config import EngineConfig
from millrace.core.records import Request, Sampling
from millrace.inference.backend import EmbeddedBackend
from millrace.inference.embedded.build import engine_of
from millrace.inference.embedded.device_memory import EngineMemory
from millrace.inference.embedded.self_test import engine_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-1.7b", help=", ".join(shapes()))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--kv-gib", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    model, tokenizer = make_model(
        args.model, dtype=torch.bfloat16, device=device, attention=engine_path(device)
    )
    memory = EngineMemory(device)
    memory.adopt(model)
    engine = engine_of(
        model,
        tokenizer,
        config=EngineConfig(max_sequences=args.sequences, max_context=2048),
        version=0,
        options=EmbeddedBackend(kv_bytes=args.kv_gib * 2**30),
        memory=memory,
    )
    sampling = Sampling(max_new_tokens=1024)
    prompt = torch.arange(3, 515).numpy().astype("int32")
    for number in range(args.sequences):
        engine.add_request(Request(id=str(number), prompt=prompt, sampling=sampling, seed=number))
    for _ in range(4):
        engine.step()
    engine.sleep()  # allocates the pinned host memory
    engine.wake()
    free = torch.cuda.mem_get_info(device)[0]
    sleeps, wakes = [], []
    for _ in range(3):
        sleeps.append(best_s(engine.sleep, repeats=1, device=device))
        asleep = torch.cuda.mem_get_info(device)[0]
        wakes.append(best_s(engine.wake, repeats=1, device=device))
        engine.step()
    weights = torch.empty(memory.weights.num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty_like(weights, device="cpu", pin_memory=True)
    floor_s = partial(best_s, repeats=3, device=device)
    result = {
        "model": args.model,
        "weights_bytes": memory.weights.num_bytes,
        "kv_bytes": memory.kv.num_bytes,
        "given_back_bytes": asleep - free,
        "sleep_s": min(sleeps),
        "wake_s": min(wakes),
        "floor_to_host_s": floor_s(lambda: host.copy_(weights, non_blocking=True)),
        "floor_from_host_s": floor_s(lambda: weights.copy_(host, non_blocking=True)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
