import numpy as np
import pytest
from batches import batch_of, mixed_rollouts

from millrace.core.errors import RunFailed
from millrace.training.group import StepsInMemory

BATCH = batch_of(mixed_rollouts(np.random.default_rng(0)))


async def versions_after(past, version):
    return [following async for following, _ in past.after(version)]


async def test_steps_since_the_last_but_one_checkpoint_are_kept():
    past = StepsInMemory(version=3)
    for version in range(4, 9):
        past.record(version, (BATCH,))
    assert await versions_after(past, 3) == [4, 5, 6, 7, 8]
    past.saved(5)
    assert await versions_after(past, 3) == [4, 5, 6, 7, 8]
    past.saved(7)
    assert await versions_after(past, 5) == [6, 7, 8]
    with pytest.raises(RunFailed, match="step 4 is no longer in memory; resume the run with"):
        await versions_after(past, 3)


async def test_the_oldest_steps_are_dropped_above_the_memory_bound():
    arrays = [a for part in BATCH.microbatches for a in (part.tokens, part.engine_logprobs)]
    past = StepsInMemory(version=0, max_bytes=20 * sum(array.nbytes for array in arrays))
    for version in range(1, 41):
        past.record(version, (BATCH,))
    assert await versions_after(past, 39) == [40]
    with pytest.raises(RunFailed, match="step 1 is no longer in memory"):
        await versions_after(past, 0)
