"""The trainer's end of a transport as a process that publishes until it is killed.

Prints each update as a line of JSON. Every value of version N is N. Reads a line "N" when version N
can be released.
"""

import sys
from pathlib import Path

import msgspec
import torch

from millrace.weights.sender import make_sender

torch.set_num_threads(1)
transport, directory = sys.argv[1:]
sender = make_sender(
    transport, dtype=torch.float32, directory=Path(directory), bucket_bytes=2**16, timeout_s=10.0
)
weights = {f"layer.{i}": torch.zeros(2**18) for i in range(8)}  # 8 MiB
version = 0
while True:
    for weight in weights.values():
        weight.fill_(version)
    sys.stdout.buffer.write(msgspec.json.encode(sender.publish(version, weights)) + b"\n")
    sys.stdout.buffer.flush()
    if not sender.has_room:
        sender.release(int(sys.stdin.readline()))
    version += 1
