"""The checked settings of `millrace serve`. Torch-free."""

import argparse
import ipaddress
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.cluster.process import available_cores
from millrace.config import RunConfig, load_config
from millrace.core.errors import ConfigError
from millrace.inference.backend import check_servers
from millrace.serving.options import LIMIT_OPTIONS, ServerLimits

KEY_VARIABLE = "MILLRACE_API_KEY"
_SECTIONS = ("engine.", "model.", "supervision.", "placement.engines", "cluster.threads")
_NOT_ALLOWED = ("engine.count", "engine.remote", "model.path")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    config: RunConfig  # only its model, engine, supervision and cluster sections are used
    engines: int  # processes that generate
    scorers: int  # processes for /score
    name: str
    host: str
    port: int
    keys: tuple[str, ...]  # empty = no key is needed
    hosts: tuple[str, ...]  # allowed in the Host header without a key
    limits: ServerLimits
    log_dir: Path
    training: "TrainingSettings | None" = None  # of --train


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    folder: Path  # of saved states, snapshots, and the logs of requests
    max_rank: int
    max_tokens: int | None = None  # of a key per minute; None = any number
    max_bytes: int | None = None  # of the saved states of a key


def read_options(args: argparse.Namespace, settings: Mapping[str, object]) -> ServeSettings:
    """Check the options; `settings` are run settings by dotted key. Raises ConfigError."""
    for key in settings:
        if not key.startswith(_SECTIONS) or key in _NOT_ALLOWED:
            raise ConfigError(
                f"--{key} is not a setting of a server; use --engine.KEY, --model.KEY,"
                " --supervision.KEY, --placement.engines, --cluster.threads and --engines."
            )
    if min(args.engines, args.scorers) < 0 or args.engines + args.scorers == 0:
        raise ConfigError(
            f"--engines {args.engines} --scorers {args.scorers} start no process; set one of them"
            " above 0."
        )
    # A RunConfig requires at least one engine.
    count = max(args.engines, 1)
    config = load_config(overrides={"engine.count": count, **settings, "model.path": args.model})
    check_servers(config)
    processes = args.engines + args.scorers + args.train
    threads = config.cluster.threads or max(1, available_cores() // processes)
    cluster = config.cluster.model_copy(update={"threads": threads})
    keys = read_keys(args.api_key_file, os.environ)
    if not keys and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} can be reached from other machines, but there is no API key; set"
            f" {KEY_VARIABLE} or --api-key-file, or use --host 127.0.0.1."
        )
    return ServeSettings(
        config=config.model_copy(update={"cluster": cluster}),
        engines=args.engines,
        scorers=args.scorers,
        name=args.name or Path(args.model).name or Path(args.model).resolve().name,
        host=args.host,
        port=args.port,
        keys=keys,
        hosts=tuple(args.allowed_host),
        limits=_limits(args),
        log_dir=args.log_dir,
        training=_training(args, config) if args.train else None,
    )


def _training(args: argparse.Namespace, config: RunConfig) -> TrainingSettings:
    if config.engine.type != "embedded" or args.engines < 1 or args.train_max_rank < 1:
        raise ConfigError(
            f"--train --engines {args.engines} --engine.type {config.engine.type} --train-max-rank"
            f" {args.train_max_rank} cannot serve adapters; use embedded engines and a rank from 1."
        )
    for option in ("--train-max-tokens", "--train-max-bytes"):
        value = getattr(args, option.removeprefix("--").replace("-", "_"))
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value} is not allowed; give a number above 0.")
    return TrainingSettings(
        folder=args.train_dir.absolute(),
        max_rank=args.train_max_rank,
        max_tokens=args.train_max_tokens,
        max_bytes=args.train_max_bytes,
    )


def _limits(args: argparse.Namespace) -> ServerLimits:
    limits: dict[str, float] = {}
    for option, (field, _) in LIMIT_OPTIONS.items():
        value = getattr(args, option.removeprefix("--").replace("-", "_"))
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value:g} is not allowed; give a number above 0.")
        limits[field] = value
    return ServerLimits(**limits)  # pyright: ignore[reportArgumentType]


def read_keys(file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The API keys of the file or, without one, of the environment; raises ConfigError."""
    if file is None:
        where = KEY_VARIABLE
        lines = [environment[where]] if where in environment else []
    else:
        try:
            where, lines = f"--api-key-file {file}", file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}.") from None
        lines = [line.strip() for line in lines if line.strip()] or [""]
    for key in lines:
        if not key.isascii() or not key.isprintable() or key.split() != [key]:
            raise ConfigError(
                f"A key in {where} is empty, or has blanks or characters that are not ASCII."
            )
    return tuple(dict.fromkeys(lines))


def is_loopback(host: str) -> bool:
    """True if only this machine reaches the address; raises ConfigError if it is none."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"Host {host!r} is not an address of this machine: {error}.") from None
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
