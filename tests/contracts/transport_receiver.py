"""The engine's end of a transport as a process: commands in, answers out, one JSON line each.

{"open": {make_receiver's arguments}}      a new receiver; answers null
{"stage": update, "want": "sums"|"bits"|"hash"}
                                           what arrived, by tensor name, or its hash; or an error's
                                           sentence
{"live": true}                             hash of what was copied in last
"""

import sys
from typing import Any

import msgspec
import torch
from fault_weights import hash_of

from millrace.core.errors import WeightError
from millrace.core.records import WeightUpdate
from millrace.weights.transport import make_receiver

torch.set_num_threads(1)


def bits(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return name, list(tensor.shape), flat.numpy().tobytes().hex()


def answers() -> Any:
    receiver, live = None, {}
    for line in sys.stdin.buffer:
        command = msgspec.json.decode(line)
        if "open" in command:
            if receiver is not None:
                receiver.close()
            arguments = command["open"]
            if "device" in arguments:
                arguments["device"] = torch.device(arguments["device"])
            if "dtype" in arguments:
                arguments["dtype"] = getattr(torch, arguments["dtype"])
            receiver, live = make_receiver(**arguments), {}
            yield None
            continue
        if "live" in command:
            yield hash_of(live)
            continue
        assert receiver is not None
        update = msgspec.convert(command["stage"], WeightUpdate)
        try:
            tensors = receiver.stage(update)
        except WeightError as error:
            yield str(error)
            continue
        live = {name: tensor.clone() for name, tensor in tensors.items()}
        if command["want"] == "hash":
            yield hash_of(live)
        elif command["want"] == "bits":
            yield {name: bits(tensor) for name, tensor in tensors.items()}
        else:
            yield {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


for answer in answers():
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
