"""The hosts of a run: checks of their settings, the hub that they reach, and the ticket for them.

Torch-free. The hub runs on the controller's event loop.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from millrace.cluster.fork_server import PRELOAD
from millrace.cluster.hub import Hub
from millrace.cluster.join.ticket import ticket_file
from millrace.cluster.launchers.hosts import HostLauncher
from millrace.cluster.launchers.launcher import Launcher
from millrace.cluster.launchers.ray_cluster import RayLauncher
from millrace.cluster.messages import Message
from millrace.config import RunConfig
from millrace.config.run_config import ClusterConfig
from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin

HEARTBEAT_TIMEOUT_S = 30.0  # of silence; then a worker on another host counts as dead


def check_cluster(config: RunConfig) -> None:
    """Raise ConfigError for settings with which other hosts cannot take part."""
    if not config.cluster.is_local:
        _launcher(config)
    elif config.engine.remote + config.trainer.remote + config.environment.remote > 0:
        _joining(config)


def _joining(config: RunConfig) -> None:
    """Engines, ranks and environment workers of other hosts must be able to join."""
    engine, trainer, cluster = config.engine, config.trainer, config.cluster
    sections = {"engine": engine, "trainer": trainer, "environment": config.environment}
    remote = next(
        f"{name}.remote = {each.remote}" for name, each in sections.items() if each.remote
    )
    if trainer.ranks == "auto" and trainer.remote:
        raise ConfigError(
            f"trainer.remote = {trainer.remote} needs a fixed number of ranks, but trainer.ranks is"
            " 'auto'; set a number."
        )
    if trainer.remote >= trainer.num_ranks:
        raise ConfigError(
            f"trainer.remote = {trainer.remote} leaves none of trainer.ranks ="
            f" {trainer.num_ranks} on this host, which rank 0 needs; lower trainer.remote."
        )
    if cluster.address == "auto":
        raise ConfigError(
            f"{remote}, but cluster.address = 'auto' is a local socket that no other host reaches;"
            " set cluster.address to 'tcp://HOST:PORT'."
        )
    if cluster.ticket is None:
        raise ConfigError(
            f"{remote}, but there is no cluster.ticket, the file that `millrace join` needs; set it"
            " to a path outside run_dir."
        )
    if Path(cluster.ticket).resolve().is_relative_to(Path(config.run_dir).resolve()):
        raise ConfigError(
            f"cluster.ticket = {cluster.ticket!r} is a secret in run_dir ="
            f" {config.run_dir!r}, which is for keeping and sharing; choose another path."
        )
    if engine.remote + trainer.remote:
        _check_transport(config, remote)


def _launcher(config: RunConfig) -> None:
    """A launcher other than that of this host starts ranks, engines and remote environment workers
    where it likes."""
    launcher = f"cluster.launcher = {config.cluster.launcher['type']!r}"
    if remote := config.engine.remote + config.trainer.remote:
        raise ConfigError(
            f"{launcher} starts the engines and ranks itself, but engine.remote and trainer.remote"
            f" wait for {remote} of them; set both to 0."
        )
    if config.cluster.share_gpu == "mps":
        raise ConfigError(
            f"{launcher} gives each process GPUs of its own, which cluster.share_gpu = 'mps' cannot"
            " share; set it to 'auto'."
        )
    placement = config.placement
    roles = [placement.models.get(name, ()) for name in config.environment.models]
    named = [*placement.trainer, *placement.engines, *itertools.chain(*roles)]
    if indexed := [device for device in named if ":" in device]:
        raise ConfigError(
            f"{launcher} chooses the GPU of each process, but [placement] names {indexed[0]!r};"
            " write 'cuda' or 'cpu'."
        )
    _check_transport(config, launcher)
    load_launcher(config.cluster)  # raises ConfigError for a wrong name or key, or without Ray


def _check_transport(config: RunConfig, setting: str) -> None:
    if config.weights.transport in ("shm", "ipc"):
        raise ConfigError(
            f"{setting}, but weights.transport = {config.weights.transport!r} reaches engines on"
            " this host only; use 'collective', or 'disk' with a directory that all hosts share."
        )


def load_launcher(settings: ClusterConfig) -> HostLauncher | None:
    """The launcher that cluster.launcher names; None for processes of this host."""
    if settings.is_local:
        if more := [key for key in settings.launcher if key != "type"]:
            raise ConfigError(f"cluster.launcher 'local' has no key {more[0]!r}; remove it.")
        return None
    builtins = {"local": HostLauncher, "ray": RayLauncher}
    found = build_plugin(
        settings.launcher, builtins=builtins, default="local", section="cluster.launcher"
    )
    if not isinstance(found, HostLauncher):
        raise ConfigError(
            f"cluster.launcher = {settings.launcher['type']!r} is not a HostLauncher; derive the"
            " class from millrace.cluster.launchers.hosts.HostLauncher."
        )
    return found


def portable(config: RunConfig) -> RunConfig:
    """The settings with paths that hold in any working directory of a host."""
    settings = config.environment
    functions = {
        key: str(Path(value).absolute())
        for key, value in {"function": settings.function, "score": settings.score}.items()
        if value is not None and ".py:" in value
    }
    adapters = {name: absolute(path) for name, path in config.engine.adapters.items()}
    path = absolute(config.model.path)
    return config.updated(
        model={"path": path}, engine={"adapters": adapters}, environment=functions
    )


def absolute(model: str) -> str:
    """A path that holds in any working directory; a name on the hub stays as it is."""
    return str(Path(model).absolute()) if Path(model).exists() else model


@contextlib.asynccontextmanager
async def open_hub(
    config: RunConfig, *, log_dir: Path, on_event: Callable[[str, Message], None]
) -> AsyncIterator[tuple[Hub, Launcher]]:
    """The hub of a run, and the launcher of its ranks and engines, which is closed after it."""
    cluster, launcher = config.cluster, load_launcher(config.cluster)
    async with contextlib.AsyncExitStack() as stack:
        address = cluster.address
        if launcher is not None:
            stack.push_async_callback(launcher.close)
            host = await launcher.connect()
            address = f"tcp://{host}:0" if address == "auto" else address
        hub = await stack.enter_async_context(
            Hub(
                log_dir=log_dir,
                on_event=on_event,
                address=address,
                advertise=cluster.advertise,
                start_timeout_s=cluster.start_timeout_s,
                heartbeat_timeout_s=min(HEARTBEAT_TIMEOUT_S, config.supervision.hang_timeout_s),
                preload=PRELOAD,
            )
        )
        if launcher is not None:
            launcher.attach(
                hub.registry,
                ticket=hub.ticket(),
                timeout_s=cluster.start_timeout_s,
                log_dir=log_dir.absolute(),  # noqa: ASYNC240 - reads no disk
            )
        yield hub, launcher or hub.local


@contextlib.contextmanager
def offered_ticket(config: RunConfig, hub: Hub) -> Iterator[None]:
    """Offer a ticket to hosts that bring workers, while the context lasts."""
    offers = [
        (config.engine.remote, "engine", ""),
        (config.trainer.remote, "rank", " --role trainer"),
        (config.environment.remote, "environment worker", " --role environment"),
    ]
    if not config.cluster.is_local or not any(count for count, *_ in offers):
        yield
        return
    path = config.cluster.ticket
    assert path is not None, "checked with the config"
    with ticket_file(hub.ticket(), Path(path)):
        for count, what, role in offers:
            if count > 0:
                print(
                    f"Waiting for {count} {what}{'s' * (count > 1)} from other hosts; copy the"
                    f" ticket there, it is a secret, and run: millrace join {path}{role}"
                    " [--count N]",
                    flush=True,
                )
        yield
