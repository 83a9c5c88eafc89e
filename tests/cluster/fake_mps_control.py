"""Stands in for nvidia-cuda-mps-control: real processes, a real socket, the same commands.

`-f` is the daemon: it starts a server in a session of its own, as the real one does, and listens in
CUDA_MPS_PIPE_DIRECTORY. Without arguments it passes commands on stdin to the daemon, and exits with
1 if there is none. FAKE_MPS picks a fault: "broken" exits at once, "stubborn" ignores `quit`,
"mute" never listens.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

FAULT = os.environ.get("FAKE_MPS", "")
PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")) / "control"


def daemon() -> None:
    if FAULT == "broken":
        sys.exit("no device, no daemon")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    record(daemon=os.getpid(), server=server.pid)
    log = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log"
    log.write_text("the daemon's own words")
    if FAULT == "mute":
        signal.pause()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(PIPE))
    listener.listen()
    while True:
        connection, _ = listener.accept()
        command = connection.recv(100).decode()
        connection.close()
        if command == "quit" and FAULT != "stubborn":
            server.kill()
            server.wait()
            return


def client() -> None:
    for command in sys.stdin.read().split():
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(PIPE))
        except OSError:
            sys.exit(1)
        connection.send(command.encode())
        connection.recv(1)  # until it is closed


def record(**pids: int) -> None:
    """What the test wants to know, in a file of the test's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    log = os.environ["CUDA_MPS_LOG_DIRECTORY"]
    table = {**pids, "pipe": str(PIPE.parent), "log": log, "visible": visible}
    mode = PIPE.parent.parent.stat().st_mode
    Path(os.environ["FAKE_MPS_RECORD"]).write_text(json.dumps({**table, "mode": mode & 0o777}))


if __name__ == "__main__":
    daemon() if sys.argv[1:] == ["-f"] else client()
