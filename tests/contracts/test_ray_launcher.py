"""The launcher of Ray clusters; `make test-ray` runs it where Ray is installed."""

from collections.abc import Iterator

import pytest
from launcher_contract import HostLauncherContract

from millrace.cluster.launchers.launcher import Resources
from millrace.cluster.launchers.ray_cluster import RayLauncher
from millrace.core.errors import ConfigError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests: each start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


class TestRayLauncher(HostLauncherContract):
    kind = "ray"
    end_timeout_s = 100.0  # agents of Ray look for their parent from time to time

    async def test_reserving_more_than_there_is_says_what_is_missing(self, launched):
        _, launcher = launched
        launcher.timeout_s = 0.5
        with pytest.raises(ConfigError, match="2 of 3 CPUs free and 0 of 0 GPUs free, and"):
            await launcher.reserve({f"trainer-{i}": Resources(cpus=2, gpus=1) for i in range(2)})
        assert "trainer-0" not in launcher._places, "nothing waits for nodes that may be added"
        await launcher.reserve({"echo-1": Resources(cpus=2)})

    async def test_released_resources_are_free_again(self, launched):
        _, launcher = launched
        await launcher.reserve({"echo-1": Resources(cpus=2)})
        await launcher.release("echo-1")
        await launcher.reserve({"echo-2": Resources(cpus=2)})

    async def test_ray_client_is_refused(self):
        with pytest.raises(ConfigError, match=r"cannot use Ray Client"):
            RayLauncher(address="ray://head:10001")
