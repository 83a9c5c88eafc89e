"""Workers on a Ray cluster: `cluster.launcher = "ray"`.

Ray finds a node for each worker and starts an actor there, which is the worker's host program: it
starts the worker as its child and dies with it. Calls, weights and supervision stay Millrace's, so
a worker costs Ray nothing while it serves.

Promise: a worker lives no longer than its actor, and an actor no longer than this process. Workers
that start together are placed together, in one placement group. What a worker has reserved stays
its own while it is restarted.
"""

import asyncio
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from millrace.cluster.join.ticket import JoinTicket
from millrace.cluster.launchers.hosts import HostLauncher
from millrace.cluster.launchers.launcher import Resources, WorkerSpec
from millrace.core.errors import ConfigError, MillraceError

_CLIENT = "ray://"
_TOKEN = "RAY_AUTH_TOKEN"  # of the cluster; no worker needs it


class RayHost:
    """The actor of one worker; run() takes its main thread until the worker has ended."""

    def run(self, ticket: bytes, spec: Mapping[str, Any], paths: Sequence[str]) -> tuple[bool, str]:
        """Returns whether the user must change something, and what happened."""
        from millrace.cluster.join.host import join

        # A worker must find the modules that the controller finds, such as those beside a script.
        sys.path += [path for path in paths if path not in sys.path]
        folder = Path(spec["folder"])
        try:
            join(
                msgspec.json.decode(ticket, type=JoinTicket),
                module=spec["module"],
                count=1,
                log_dir=Path(spec["log_dir"]),
                role=spec["name"],
                env={**spec["env"], **({_TOKEN: ""} if spec["has_secrets"] else {})},
                has_secrets=spec["has_secrets"],
                folder=folder if folder.is_dir() else None,
            )
        except MillraceError as error:
            return isinstance(error, ConfigError), str(error)
        return False, "its worker has ended"


@dataclass(kw_only=True, eq=False)
class _RayProgram:
    actor: Any
    running: Any  # the ObjectRef of run()

    async def ended(self) -> Exception | str:
        errors = _ray().exceptions
        try:
            is_for_user, reason = await asyncio.wrap_future(self.running.future())
        except errors.RayActorError:
            return "its Ray actor died"
        except errors.RayError as error:
            return f"its Ray actor failed: {str(error).strip().splitlines()[-1]}"
        return ConfigError(reason) if is_for_user else reason

    def kill(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            ray.kill(self.actor)


@dataclass(kw_only=True, eq=False)
class RayLauncher(HostLauncher):
    address: str | None = None
    """Address of a running cluster, "HOST:PORT", or "auto" for the one of this host. By default
    RAY_ADDRESS, which `ray job submit` sets; without it, a cluster is started on this host for the
    time of the run."""
    _places: dict[str, tuple[Any, int, Resources]] = field(default_factory=dict, init=False)
    _is_own: bool = field(default=False, init=False)  # the cluster ends with the run
    _has_connected: bool = field(default=False, init=False)  # not the user's own script

    def __post_init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "cluster.launcher = 'ray' needs Ray, which is not installed here; run: pip install"
                " 'ray>=2.40'."
            )
        if (self.address or os.environ.get("RAY_ADDRESS", "")).startswith(_CLIENT):
            raise ConfigError(
                "cluster.launcher 'ray' cannot use Ray Client (ray://): run `millrace train` on a"
                " host of the cluster, or submit it with `ray job submit`."
            )

    async def connect(self) -> str:
        ray = _ray()
        if not ray.is_initialized():
            self._is_own = not (self.address or os.environ.get("RAY_ADDRESS"))
            # In a thread: in the main one, Ray would replace the handler of SIGTERM.
            await asyncio.to_thread(self._init)
            _restore_sigterm()
            self._has_connected = True
        return "127.0.0.1" if self._is_own else str(ray.util.get_node_ip_address())

    def _init(self) -> None:
        ray = _ray()
        options: dict[str, Any] = {"address": self.address}
        if self._is_own:  # without an address, Ray would use any cluster that it finds on this host
            options = {"address": "local", "include_dashboard": False}
        try:
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            where = self.address or os.environ.get("RAY_ADDRESS")
            what = f"No Ray cluster at {where!r}" if where else "Ray did not start on this host"
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{what} ({reason.rstrip('.')}); start one with `ray start --head`, or correct"
                " cluster.launcher.address."
            ) from error

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        if self._is_own:  # it does not grow
            await self._check_room(workers)
        bundles = [_bundle(needed) for needed in workers.values()]
        group = await asyncio.to_thread(_ray().util.placement_group, bundles, strategy="PACK")
        for index, (name, needed) in enumerate(workers.items()):
            self._places[name] = group, index, needed
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.wrap_future(group.ready().future())
        except BaseException as error:
            for name in workers:  # a run that continues without them must not hold them later
                await self.release(name)
            if not isinstance(error, TimeoutError):
                raise
            await self._check_room(workers)
            raise ConfigError(
                f"Ray did not place {', '.join(workers)} within {self.timeout_s:g} s: no node has"
                f" {_sentence(max(bundles, key=lambda b: sum(b.values())))} free for each of them;"
                " lower cluster.threads, or add nodes."
            ) from None

    async def _check_room(self, workers: Mapping[str, Resources]) -> None:
        ray = _ray()
        free, total = await asyncio.gather(
            asyncio.to_thread(ray.available_resources), asyncio.to_thread(ray.cluster_resources)
        )
        bundles = [_bundle(needed) for needed in workers.values()]
        needs = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        if missing := [kind for kind, count in needs.items() if count > free.get(kind, 0)]:
            has = " and ".join(
                f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in missing
            )
            more = "cluster.threads" if "CPU" in missing else "engine.tp"
            raise ConfigError(
                f"Ray has {has}, too few for {', '.join(workers)} ({_sentence(needs)}); lower"
                f" engine.count, trainer.ranks or {more}, or add nodes."
            )

    async def release(self, name: str) -> None:
        ray = _ray()
        group, *_ = self._places.pop(name)
        if all(other is not group for other, *_ in self._places.values()):
            await asyncio.to_thread(ray.util.remove_placement_group, group)

    async def start_host(self, spec: WorkerSpec) -> _RayProgram:
        return await asyncio.to_thread(self._start_actor, spec)

    def _start_actor(self, spec: WorkerSpec) -> _RayProgram:
        ray = _ray()
        group, index, needed = self._places[spec.name]
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
        options: dict[str, Any] = {
            "num_cpus": needed.cpus,
            "num_gpus": needed.gpus,
            "scheduling_strategy": strategy,
        }
        actor = ray.remote(RayHost).options(**options).remote()
        job = {
            "name": spec.name,
            "module": spec.module,
            "env": dict(spec.env),
            "has_secrets": spec.has_secrets,
            "folder": str(Path.cwd()),
            "log_dir": str(self.log_dir),
        }
        own = (sys.prefix, sys.base_prefix)
        paths = [str(Path(path).absolute()) for path in sys.path if not path.startswith(own)]
        running = actor.run.remote(msgspec.json.encode(self.ticket), job, paths)
        return _RayProgram(actor=actor, running=running)

    async def close(self) -> None:
        ray = _ray()
        if self._has_connected:
            await asyncio.to_thread(ray.shutdown)
            return
        for name in list(self._places):
            await self.release(name)


def _restore_sigterm() -> None:
    """Ray's native code also sets a handler, from any thread, which aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _ray() -> Any:
    """The package, which is imported only if it is used."""
    return importlib.import_module("ray")


def _bundle(needed: Resources) -> dict[str, float]:
    counts: dict[str, float] = {"CPU": needed.cpus, "GPU": needed.gpus}
    return {kind: count for kind, count in counts.items() if count}


def _sentence(needs: Mapping[str, float]) -> str:
    return " and ".join(
        f"{count:g} {kind}{'s' * (count != 1)}" for kind, count in needs.items() if count
    )
