"""The engine's end of a transport as a process: WeightUpdates in, sums of their tensors out."""

import sys

import msgspec
import torch

from millrace.core.errors import WeightError
from millrace.core.weight_update import WeightUpdate
from millrace.weights.receiver import make_receiver

torch.set_num_threads(1)
receiver = make_receiver(sys.argv[1])
for line in sys.stdin.buffer:
    try:
        tensors = receiver.stage(msgspec.json.decode(line, type=WeightUpdate))
        answer = {name: float(tensor.double().sum()) for name, tensor in tensors.items()}
    except WeightError as error:
        answer = str(error)
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
