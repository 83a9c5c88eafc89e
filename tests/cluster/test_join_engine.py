"""`millrace join` as a user runs it: a real engine that loads a model on its own host."""

from pathlib import Path

import numpy as np
import pytest
from hosts import Host, expect, outside_address, write_ticket
from tiny_model import make_tiny_model

from millrace.cluster.hub import Hub
from millrace.cluster.messages import Done, Generate, GenerateDone, StartEngine
from millrace.config import load_config
from millrace.core.errors import ConfigError
from millrace.core.records import Request, Sampling


@pytest.mark.slow  # tests/e2e/test_remote_engine.py has one that joins a run
async def test_engine_of_another_host_serves_or_reports_that_its_model_is_missing(tmp_path: Path):
    model = str(make_tiny_model(tmp_path / "model"))
    config = load_config({"model": model, "cluster": {"threads": 1}}).model_dump(mode="json")
    address = f"tcp://{outside_address()}:0"
    async with Hub(log_dir=tmp_path, on_event=lambda *_: None, address=address) as hub:
        expected = expect(hub, "engine-0", timeout_s=60)
        ticket = write_ticket(hub, tmp_path / "ticket.json")
        host = await Host.start("join", ticket, folder=tmp_path / "far", script="millrace.cli.main")
        engine = await expected
        with pytest.raises(ConfigError, match="Model '/no/such/model' does not exist"):
            await engine.call(StartEngine(config=config, model_path="/no/such/model", version=0))
        start = StartEngine(config=config, model_path=model, version=3)
        assert isinstance(await engine.call(start), Done)
        request = Request(
            id="r", prompt=np.array([2, 3], np.int32), sampling=Sampling(max_new_tokens=5)
        )
        reply = await engine.call(Generate(request=request))
        assert isinstance(reply, GenerateDone)
        assert set(reply.completions[0].versions.tolist()) == {3}
    code, stdout, stderr = await host.finish()
    assert (code, stderr) == (0, "")
    assert "with engine-0" in stdout
    assert (host.folder / "logs" / "engine-0.log").is_file()
