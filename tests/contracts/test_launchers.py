"""The launchers of this host and of hosts that join, and one that starts host programs, as a user's
own class may."""

from importlib.util import find_spec

import pytest
from launcher_contract import HostLauncherContract, LauncherContract
from launchers import SmallCluster

from millrace.cluster.launchers.launcher import Resources
from millrace.config.run_config import ClusterConfig
from millrace.core.errors import ConfigError
from millrace.run.cluster import load_launcher


class TestLocalLauncher(LauncherContract):
    kind = "local"


class TestHostLauncher(HostLauncherContract):
    kind = "cluster"

    async def test_reserving_more_than_there_is_is_refused(self, launched):
        _, launcher = launched
        with pytest.raises(ConfigError, match="1 of 2 CPUs free, not 2 CPUs"):
            await launcher.reserve({"echo-1": Resources(cpus=2)})


class TestJoinLauncher(HostLauncherContract):
    kind = "join"


def test_launcher_is_found_by_name(tmp_path):
    named = {"type": "launchers:SmallCluster", "folder": tmp_path}
    assert isinstance(load_launcher(ClusterConfig(launcher=named)), SmallCluster)
    assert load_launcher(ClusterConfig()) is None


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ({"type": "rya"}, "'cluster.launcher.type' = 'rya' is not known; did you mean 'ray'"),
        ({"type": "ray", "adress": "x"}, "Unknown setting 'cluster.launcher.adress' of 'ray'"),
        ({"type": "local", "address": "x"}, "'local' has no key 'address'"),
        ({"type": "pathlib:Path"}, "is not a HostLauncher"),
    ],
)
def test_wrong_launcher_is_one_sentence(launcher, message):
    with pytest.raises(ConfigError) as caught:
        load_launcher(ClusterConfig(launcher=launcher))
    assert message in str(caught.value)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_missing_ray_is_one_sentence():
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed here; run: pip"):
        load_launcher(ClusterConfig(launcher={"type": "ray"}))
