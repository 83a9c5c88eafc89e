"""The trainer's end of a transport as a process that publishes until it is killed.

Prints each update as a line of JSON; fault_weights.py makes the weights. Reads a line "N" when
version N can be released. Arguments: transport, kind of payload, directory.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from fault_weights import weights_of

from millrace.weights.transport import make_sender

torch.set_num_threads(1)
transport, directory = sys.argv[1], Path(sys.argv[3])
kind: Any = sys.argv[2]
sender = make_sender(
    transport,
    dtype=torch.float32,
    payload="delta" if kind == "delta" else "full",
    directory=directory,
    bucket_bytes=2**16,
    timeout_s=10.0,
)
for version in itertools.count():
    weights = weights_of(version, kind)
    if transport == "ipc":
        weights = {name: weight.cuda() for name, weight in weights.items()}
    update = sender.publish(version, weights)
    sys.stdout.buffer.write(msgspec.json.encode(update) + b"\n")
    sys.stdout.buffer.flush()
    if not sender.has_room:
        sender.release(int(sys.stdin.readline()))
