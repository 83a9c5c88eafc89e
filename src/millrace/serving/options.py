"""The options of `millrace serve`. Nothing heavy is imported here: `millrace --help` reads it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

SERVE = """\
Serve a model over HTTP: the OpenAI API (/v1/chat/completions, /v1/completions, /v1/models), tokens
in and out (/generate), /health and /metrics; with --scorers also how likely given tokens are
(/score). Any setting of the engines can be given as --engine.key value, and when one that died is
started again as --supervision.key value.

It listens on this machine only. Beyond that it wants a key, which clients must show: in the
environment as MILLRACE_API_KEY, or in a file.
"""

SERVE_MORE = """\
examples:
  millrace serve Qwen/Qwen3-0.6B
  millrace serve runs/run/checkpoints/step_100 --engines 2 --engine.dtype bfloat16
  millrace serve my-model --host 0.0.0.0 --api-key-file key.txt
  millrace serve my-teacher --engines 0 --scorers 2
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    body_bytes: int = 4 * 2**20
    requests: int = 1024  # at once
    rate: float = 1000.0  # requests each second, of one client
    wait_s: float = 60.0  # of a request, for an engine while none is up
    connections: int = 4096  # at once
    patience_s: float = 60.0  # for a request to arrive, and for a client to take what it gets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    limits = ServerLimits()
    parser.add_argument("model", metavar="MODEL", help="model directory or hub name")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--scorers",
        type=int,
        default=0,
        metavar="N",
        help="processes for /score, with a copy of the model each (default: 0)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 = any free one (default: 8000)")
    parser.add_argument("--name", help="by which clients ask for it (default: MODEL's last part)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE")
    for option, kind, default, what in (
        ("--max-requests", int, limits.requests, "answered at once; others are told to come later"),
        ("--max-rate", float, limits.rate, "requests each second, of one client"),
        ("--max-body-bytes", int, limits.body_bytes, "of one request"),
        (
            "--max-wait",
            float,
            limits.wait_s,
            "seconds, for an engine while none is up",
        ),
    ):
        says = f"{what} (default: {default})"
        parser.add_argument(option, type=kind, default=default, metavar="N", help=says)
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=Path("logs"),
        metavar="DIR",
        help="what the engines print (default: logs)",
    )
