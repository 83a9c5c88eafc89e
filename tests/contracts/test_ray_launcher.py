"""The launcher of Ray clusters; `make test-ray` runs it where Ray is installed."""

from collections.abc import Iterator

import pytest
from launcher_contract import HostLauncherContract

from millrace.cluster.launchers.launcher import Resources
from millrace.cluster.launchers.ray_cluster import RayLauncher
from millrace.cluster.messages import GenerateDone
from millrace.cluster.worker import Worker
from millrace.core.errors import ConfigError

from echo_worker import ask  # isort: skip - launcher_contract.py finds it

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all tests: each start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=3, num_gpus=2, **quiet)  # Ray gives out GPUs that need not exist
        yield
        ray.shutdown()


async def gpus_of(worker: Worker) -> list[int]:
    """The numbers in CUDA_VISIBLE_DEVICES of the worker."""
    reply = await worker.call(ask("gpus"))
    assert isinstance(reply, GenerateDone)
    return reply.completions[0].tokens.tolist()


class TestRayLauncher(HostLauncherContract):
    kind = "ray"
    end_timeout_s = 100.0  # agents of Ray look for their parent from time to time

    async def test_reserving_more_than_there_is_says_what_is_missing(self, launched):
        _, launcher = launched
        launcher.timeout_s = 0.5
        missing = "2 of 3 CPUs free and 2 of 2 GPUs free, too few for trainer-0, trainer-1"
        with pytest.raises(ConfigError, match=rf"{missing} \(4 CPUs and 4 GPUs\)"):
            await launcher.reserve({f"trainer-{i}": Resources(cpus=2, gpus=2) for i in range(2)})
        assert "trainer-0" not in launcher._places, "nothing waits for nodes that may be added"
        await launcher.reserve({"echo-1": Resources(cpus=2)})

    async def test_too_few_gpus_are_one_sentence_with_which_and_how_many(self, launched):
        _, launcher = launched
        launcher.timeout_s = 0.5
        with pytest.raises(ConfigError) as refused:
            await launcher.reserve({"engine-0": Resources(gpus=3)})
        assert str(refused.value) == (
            "Ray has 2 of 2 GPUs free, too few for engine-0 (1 CPU and 3 GPUs); lower engine.count,"
            " trainer.ranks or engine.tp, or add nodes."
        )

    async def test_worker_sees_the_gpu_of_its_bundle_also_when_it_is_started_again(self, launched):
        hub, launcher = launched
        names = ("echo-1", "echo-2")
        await launcher.reserve({name: Resources(gpus=1) for name in names})
        workers = {name: await hub.launch(name, "echo_worker", launcher=launcher) for name in names}
        seen = {name: await gpus_of(worker) for name, worker in workers.items()}
        assert sorted(seen.values()) == [[0], [1]]
        for name, worker in workers.items():
            worker.kill()
            assert await worker.is_gone_within(10)
            again = await hub.launch(name, "echo_worker", launcher=launcher)
            assert await gpus_of(again) == seen[name]

    async def test_worker_that_needs_two_gpus_sees_both(self, launched):
        """As an engine whose server has engine.tp = 2."""
        hub, launcher = launched
        await launcher.reserve({"echo-1": Resources(gpus=2)})
        worker = await hub.launch("echo-1", "echo_worker", launcher=launcher)
        assert sorted(await gpus_of(worker)) == [0, 1]

    async def test_released_resources_are_free_again(self, launched):
        _, launcher = launched
        await launcher.reserve({"echo-1": Resources(cpus=2)})
        await launcher.release("echo-1")
        await launcher.reserve({"echo-2": Resources(cpus=2)})

    async def test_ray_client_is_refused(self):
        with pytest.raises(ConfigError, match=r"cannot use Ray Client"):
            RayLauncher(address="ray://head:10001")
