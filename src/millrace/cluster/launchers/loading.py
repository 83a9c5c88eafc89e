"""The launcher that cluster.launcher names."""

from millrace.cluster.launchers.hosts import HostLauncher
from millrace.cluster.launchers.ray_cluster import RayLauncher
from millrace.config.run_config import ClusterConfig
from millrace.core.errors import ConfigError
from millrace.core.plugins import build_plugin

LAUNCHERS = {"ray": RayLauncher}


def load_launcher(settings: ClusterConfig) -> HostLauncher | None:
    """None for processes of this host, which the hub starts."""
    if settings.is_local:
        if more := [key for key in settings.launcher if key != "type"]:
            raise ConfigError(f"cluster.launcher 'local' has no key {more[0]!r}; remove it.")
        return None
    builtins = {"local": HostLauncher, **LAUNCHERS}
    found = build_plugin(
        settings.launcher, builtins=builtins, default="local", section="cluster.launcher"
    )
    if not isinstance(found, HostLauncher):
        raise ConfigError(
            f"cluster.launcher = {settings.launcher['type']!r} is not a HostLauncher; derive the"
            " class from millrace.cluster.launchers.hosts.HostLauncher."
        )
    return found
