"""What it costs an engine to sleep and wake up, beside the bare copies between GPU and host.

    python benchmarks/sleep.py --model qwen3-1.7b

Needs a GPU. Prints one line of JSON for each cycle, with the seconds of sleep and of wake, and one
with the best of them at the end: bytes that sleep gives back, bytes of weights and of running
sequences' KV that it saves, and seconds of one plain copy of as many bytes from and to pinned host
memory, which are the floor. benchmarks/largest_model.py measures what the memory is good for.
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
    engine = engine_of(
        model,
        tokenizer,
        config=EngineConfig(max_sequences=args.sequences, max_context=2048),
        version=0,
        # Compiling takes half a minute, and sleep has nothing to do with it.
        options=EmbeddedBackend(kv_bytes=args.kv_gib * 2**30, compile=False),
        memory=memory,
    )
    sampling = Sampling(max_new_tokens=1024)
    generator = torch.Generator().manual_seed(0)
    for number in range(args.sequences):  # different prompts, which share no KV
        prompt = torch.randint(3, 1000, (512,), generator=generator).numpy().astype("int32")
        engine.add_request(Request(id=str(number), prompt=prompt, sampling=sampling, seed=number))
    while engine.stats().generated_tokens < 100 * args.sequences:
        engine.step()
    cycles, kv_bytes = [], 0
    for number in range(4):  # the first allocates the pinned host memory
        free = torch.cuda.mem_get_info(device)[0]
        sleep_s = best_s(engine.sleep, repeats=1, device=device)
        asleep = torch.cuda.mem_get_info(device)[0]
        assert engine._saved_kv is not None
        kv_bytes = sum(tensor.nbytes for tensor in engine._saved_kv[0].values())
        wake_s = best_s(engine.wake, repeats=1, device=device)
        cycle = {"sleep_s": sleep_s, "wake_s": wake_s, "given_back_bytes": asleep - free}
        cycles.append(cycle)
        print(json.dumps({"cycle": number, **cycle}), flush=True)
        engine.step()
    weights_bytes = memory.weights.num_bytes
    copied = torch.empty(weights_bytes + kv_bytes, dtype=torch.uint8, device=device)
    host = torch.empty_like(copied, device="cpu", pin_memory=True)
    floor_s = partial(best_s, repeats=3, device=device)
    result = {
        "model": args.model,
        "device": torch.cuda.get_device_name(device),
        "weights_bytes": weights_bytes,
        "kv_cache_bytes": memory.kv.num_bytes,
        "saved_kv_bytes": kv_bytes,
        "given_back_bytes": cycles[-1]["given_back_bytes"],
        "sleep_s": min(cycle["sleep_s"] for cycle in cycles),
        "wake_s": min(cycle["wake_s"] for cycle in cycles),
        "floor_to_host_s": floor_s(lambda: host.copy_(copied, non_blocking=True)),
        "floor_from_host_s": floor_s(lambda: copied.copy_(host, non_blocking=True)),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
