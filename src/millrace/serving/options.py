"""The options of `millrace serve`. Imports nothing heavy, because `millrace --help` reads it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

SERVE = """\
Serve a model over HTTP: the OpenAI API (/v1/chat/completions, /v1/responses, /v1/completions,
/v1/models), /health and /metrics; with --scorers also logprobs of given tokens (/score);
with --train also the Tinker training API (/api/v1).
Any setting of the engines can be given as --engine.key value, and the restart policy of workers as
--supervision.key value.

By default the server listens on this machine only. Any other --host requires an API key, in the
environment variable MILLRACE_API_KEY or in a file.
"""

SERVE_MORE = """\
examples:
  millrace serve Qwen/Qwen3-0.6B
  millrace serve runs/run/checkpoints/step_100 --engines 2 --engine.dtype bfloat16
  millrace serve my-model --host 0.0.0.0 --api-key-file key.txt
  millrace serve my-teacher --engines 0 --scorers 2
  millrace serve Qwen/Qwen3-0.6B --train
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    body_bytes: int = 4 * 2**20
    completions: int = 256  # of one request: prompts times n
    requests: int = 1024  # concurrent
    rate: float = 1000.0  # requests per second and client
    wait_s: float = 60.0  # of a request, for an engine while none is ready
    connections: int = 4096  # concurrent
    timeout_s: float = 60.0  # for a request to arrive, and for a client to read its reply


LIMIT_OPTIONS = {  # field of ServerLimits, and help
    "--max-requests": ("requests", "concurrent requests; further ones get status 429"),
    "--max-rate": ("rate", "requests per second and client"),
    "--max-completions": ("completions", "completions of one request: its prompts times n"),
    "--max-body-bytes": ("body_bytes", "size of one request body"),
    "--max-wait": ("wait_s", "seconds that a request waits while no engine is ready"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="model directory or hub name")
    add("--engines", type=int, default=1, metavar="N", help="(default: 1)")
    scorers = "processes for /score, with a copy of the model each (default: 0)"
    add("--scorers", type=int, default=0, metavar="N", help=scorers)
    training = "also serve the Tinker training API, under /api/v1"
    add("--train", action="store_true", help=training)
    states = "directory of saved states and of the log of requests with --train (default: training)"
    add("--train-dir", type=Path, default=Path("training"), metavar="DIR", help=states)
    rank = "largest rank of an adapter with --train (default: 32)"
    add("--train-max-rank", type=int, default=32, metavar="R", help=rank)
    tokens = "tokens that each key may use per minute, also in the OpenAI API (default: any number)"
    add("--train-max-tokens", type=int, metavar="N", help=tokens)
    size = "bytes of saved states of each key; a save beyond them fails (default: any number)"
    add("--train-max-bytes", type=int, metavar="N", help=size)
    add("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 chooses a free port (default: 8000)")
    add("--name", help="model name for clients (default: MODEL's last part)")
    keys = "file with API keys, one per line; each is a client of its own"
    add("--api-key-file", type=Path, metavar="FILE", help=keys)
    hosts = "name in the Host header that a server without a key accepts; can be repeated"
    add("--allowed-host", action="append", default=[], metavar="NAME", help=hosts)
    for option, (field, text) in LIMIT_OPTIONS.items():
        default = getattr(ServerLimits(), field)
        text = f"{text} (default: {default})"
        add(option, type=type(default), default=default, metavar="N", help=text)
    logs = "directory for the output of engines (default: logs)"
    add("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help=logs)
