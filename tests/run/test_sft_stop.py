"""How fine-tuning ends when it is stopped."""

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.core.errors import CheckpointError, Preempted
from millrace.run.sft.execute import SftRun


class Writer:
    """Its store does not answer."""

    def begin_uploads(self) -> None: ...

    async def finish_writing(self) -> None: ...

    async def finish_uploads(self) -> None:
        raise CheckpointError("checkpoint.path = 's3://gone' did not take step_1.")


async def test_stopped_run_is_preempted_although_its_store_does_not_answer():
    run: Any = SimpleNamespace(
        _version=1,
        _saved=1,  # on the disk
        _has_next=True,
        _monitor=SimpleNamespace(begin_training=lambda: None),
        preemption=SimpleNamespace(is_requested=True, reason="SIGTERM"),
    )
    writer: Any = Writer()
    unused: Any = None
    with pytest.raises(Preempted, match="SIGTERM stopped the run after step 1"):
        await SftRun._train(run, unused, writer, unused)
